"""Child processes that answer JSON lines within limits of time and memory."""
