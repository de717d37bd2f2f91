"""One training run: the loop, rank 0's other work, output folder, metrics and display."""
