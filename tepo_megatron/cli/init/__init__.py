"""The command ``tepo init``."""
