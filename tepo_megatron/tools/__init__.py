"""Benchmarks, injected faults, reports and sweeps. They depend on ``run``."""
