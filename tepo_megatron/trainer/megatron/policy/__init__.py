"""The policy: its weights and where they are."""
