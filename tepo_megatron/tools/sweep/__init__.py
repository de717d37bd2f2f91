"""Many runs from one file: a grid of settings and seeds, run in sequence or by several jobs, and one table."""
