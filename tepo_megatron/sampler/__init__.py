"""vLLM servers that draw responses."""
