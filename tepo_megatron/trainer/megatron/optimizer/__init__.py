"""Megatron's optimizer and its states."""
