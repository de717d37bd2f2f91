"""Heartbeats of ranks, and the watch over them."""
