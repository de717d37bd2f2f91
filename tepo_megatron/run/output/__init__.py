"""A run's folder: checkpoints, rows, samples, status."""
