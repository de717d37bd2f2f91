"""One HTML page about runs: curves, settings, times, faults, and samples token by token."""
