"""Benchmarks of parts of the system (``tepo bench``)."""
