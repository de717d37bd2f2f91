"""A run's folder: checkpoints to resume from, rows, samples, status."""
