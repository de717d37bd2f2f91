"""Weight transfers between processes, by a plan or as full tensors."""
