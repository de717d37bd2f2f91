"""The commands ``tepo objective``."""
