"""From YAML files and dotted overrides to a checked ``RunConfig``."""
