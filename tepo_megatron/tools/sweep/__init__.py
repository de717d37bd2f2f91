"""Many runs from one file: a grid of settings and seeds, run one after another or by several jobs, and one table."""
