"""What a user sees during a run."""
