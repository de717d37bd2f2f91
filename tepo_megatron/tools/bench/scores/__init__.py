"""Time and memory of log-prob and entropy of sharded logits, beside other ways to compute them."""
