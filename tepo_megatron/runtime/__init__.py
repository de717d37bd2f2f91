"""Processes, signals, locks, child workers and files. No word of RL."""
