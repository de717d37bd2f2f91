"""What can go wrong with a run, made on purpose."""
