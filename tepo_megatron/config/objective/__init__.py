"""The section ``objective``."""
