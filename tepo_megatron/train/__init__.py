"""The loop, its state, its metrics and what a user sees of them."""
