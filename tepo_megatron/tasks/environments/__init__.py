"""Environments of several turns, in limited processes, here or on other machines."""
