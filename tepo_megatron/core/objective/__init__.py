"""The paper's mathematics on [sequence, token] values."""
