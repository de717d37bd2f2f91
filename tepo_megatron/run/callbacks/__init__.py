"""User callbacks, and how they end a run."""
