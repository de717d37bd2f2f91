"""The rules that every objective keeps to, as checks (docs/guides/own-objective.md)."""
