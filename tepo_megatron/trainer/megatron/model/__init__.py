"""The model and its layers."""
