"""Scores of sharded logits, compared with other methods."""
