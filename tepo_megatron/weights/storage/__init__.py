"""Weights on disk: Hugging Face folders, and files of single ranks."""
