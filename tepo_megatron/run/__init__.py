"""A training run: the loop, rank 0's other work, output, display."""
