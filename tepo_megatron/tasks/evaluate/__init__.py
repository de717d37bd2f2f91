"""Evaluation: greedy accuracy, avg@k, pass@k and maj@k."""
