"""Processes, signals, locks and files; no RL."""
