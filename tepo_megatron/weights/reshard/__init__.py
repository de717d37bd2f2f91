"""Plans which rank sends which box to whom, and proves a plan complete before a byte moves. Nothing communicates."""
