"""The sampler's side: vLLM servers, started, watched and restarted; prompts out, groups of responses back."""
