"""Weights between Hugging Face folders, Megatron-Core and vLLM: layouts, reshard plans, transfers, files."""
