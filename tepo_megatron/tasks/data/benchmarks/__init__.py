"""Published benchmarks, and prompts for families of models."""
