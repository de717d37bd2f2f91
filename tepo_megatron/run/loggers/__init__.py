"""W&B and MLflow. ``loggers.py`` is rank 0's side, ``process.py`` the child process (decision 041)."""
