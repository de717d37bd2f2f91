"""Time and memory of a training step, compared with Megatron-Core and an older version."""
