"""Environments of several turns, in processes with limits, here or on other machines."""
