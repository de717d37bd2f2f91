"""Prompt sources, tokenizers (SentencePiece, Hugging Face), built-in tasks and the model that ships with the package."""
