"""Weights on disk: Hugging Face folders, and files of single ranks from which any box of a tensor can be read."""
