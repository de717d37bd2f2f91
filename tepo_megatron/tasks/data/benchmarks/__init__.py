"""Published benchmarks: where their files are, how they become problems, and prompts for families of models."""
