"""One page to look at runs in a browser: curves, settings, times, faults, and samples token by token."""
