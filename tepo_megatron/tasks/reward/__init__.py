"""Verifiers, and the pool of worker processes that runs them."""
