"""Heartbeats of a run's processes, and who reads them: the watch over the ranks of a machine, and ``tepo status``."""
