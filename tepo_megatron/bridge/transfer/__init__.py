"""A plan carried out between processes: messages, transports, digests; and full tensors, the plain way beside it."""
