"""Held-out problems and evaluation sets: greedy accuracy, avg@k, pass@k and maj@k, with samples to read."""
