"""Benchmarks of parts of the system, which ``tepo bench`` runs."""
