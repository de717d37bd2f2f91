"""Injected faults of a run."""
