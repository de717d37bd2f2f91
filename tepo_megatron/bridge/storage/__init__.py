"""Weights on disk: Hugging Face folders and the files of a rank, read by the box, written by the tensor."""
