"""Benchmarks, injected faults, reports and sweeps."""
