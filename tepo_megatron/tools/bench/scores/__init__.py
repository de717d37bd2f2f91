"""Time and memory of log-prob and entropy of sharded logits, compared with other methods."""
