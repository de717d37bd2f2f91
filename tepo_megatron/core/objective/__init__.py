"""The objective's mathematics."""
