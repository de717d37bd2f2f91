"""How ranks share a world, a batch and small values."""
