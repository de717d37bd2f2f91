"""Packed batches and micro-batches."""
