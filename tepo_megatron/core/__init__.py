"""Values and maths: what passes between folders, the objective, and scores of sharded logits."""
