"""Processes, signals, locks, child workers and files; no RL."""
