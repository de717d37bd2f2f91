"""The trainer."""
