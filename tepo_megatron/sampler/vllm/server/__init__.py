"""A vLLM server's process, its limits and its log."""
