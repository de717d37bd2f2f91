"""W&B and MLflow: rank 0's side and the child process (decision 041)."""
