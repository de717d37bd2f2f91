"""Plans which rank sends which box to which rank, and proves the plan complete."""
