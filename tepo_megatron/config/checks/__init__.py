"""Refusals of settings that cannot work together."""
