"""Carries out a plan between processes: messages, transports, digests. Beside it the plain way, which sends full tensors."""
