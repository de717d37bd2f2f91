"""The bridge from Megatron's shards to vLLM's: layouts by the names of Hugging Face tensors, plans, transfers, storage."""
