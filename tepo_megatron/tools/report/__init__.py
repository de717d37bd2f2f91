"""One HTML page about runs."""
