"""The figures of a step and of its tokens."""
