"""Weights in Hugging Face folders, Megatron-Core and vLLM."""
