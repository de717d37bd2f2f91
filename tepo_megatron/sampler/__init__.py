"""The sampler's side: vLLM servers that draw responses."""
