"""Scores and updates."""
