"""TEPO (Token-Level Policy Optimization) on Megatron-Core, with vLLM rollouts."""

__version__ = "0.1.0"
