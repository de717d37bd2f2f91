"""The trainer on Megatron-Core; only it and benchmarks import megatron.core."""
