"""Saving and loading the shards of model and optimizer."""
