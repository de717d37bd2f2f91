"""HTTP clients of a vLLM server."""
