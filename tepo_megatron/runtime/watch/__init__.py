"""Heartbeats of ranks, and the watch over the ranks of a machine."""
