"""Measurements of parts of the system, as commands."""
