"""What surrounds a step: mini-batches, skipped updates, rollback, placement."""
