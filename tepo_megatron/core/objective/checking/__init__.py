"""The rules that every objective keeps to, as checks: for the package's presets and for the user's (docs/own-objective.md)."""
