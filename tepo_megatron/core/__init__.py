"""Values and maths: values that pass between folders, the objective, and scores of sharded logits."""
