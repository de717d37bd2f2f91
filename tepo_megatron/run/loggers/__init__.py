"""Loggers beside ``metrics.jsonl``: W&B and MLflow, each in a process of its own that follows that file.

``loggers.py`` is rank 0's side, ``process.py`` the process, ``follow.py`` says which rows are new, and
``wandb_client.py`` and ``mlflow_client.py`` talk to the packages. Decision 041 says why.
"""
