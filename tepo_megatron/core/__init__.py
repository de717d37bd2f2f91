"""Values that pass between folders, the objective's mathematics, and scores."""
