"""Training steps, compared with Megatron-Core and an older version."""
