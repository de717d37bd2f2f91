"""Carries out a plan between processes: messages, transports, digests; and the plain way, which sends full tensors."""
