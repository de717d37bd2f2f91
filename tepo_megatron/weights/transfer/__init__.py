"""Carries out a plan between processes; or the plain way, which sends full tensors."""
