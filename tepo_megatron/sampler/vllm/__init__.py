"""Everything that speaks to vLLM or runs within it."""
