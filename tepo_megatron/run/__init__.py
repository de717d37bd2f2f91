"""One training run: the loop, what rank 0 does beside it, its output folder, metrics and display."""
