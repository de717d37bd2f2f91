"""Prompt sources, tokenizers, built-in tasks and the built-in model."""
