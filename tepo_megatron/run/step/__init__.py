"""The surroundings of a step: mini-batches, skipped updates, rollback, placement."""
