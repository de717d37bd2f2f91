"""Measures held-out accuracy: greedy, avg@k and pass@k, with samples to read."""
