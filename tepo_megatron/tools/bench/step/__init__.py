"""Time and memory of a training step, beside the step of Megatron-Core and an older state of this package."""
