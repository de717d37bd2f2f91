"""Code that speaks to vLLM or runs inside it."""
