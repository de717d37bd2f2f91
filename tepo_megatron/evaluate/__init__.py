"""Held-out accuracy: greedy, avg@k and pass@k, with readable samples."""
