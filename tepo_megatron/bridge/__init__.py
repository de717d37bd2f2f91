"""Megatron shards ⇄ Hugging Face names ⇄ vLLM: where each part of each weight lies, and how it travels."""
