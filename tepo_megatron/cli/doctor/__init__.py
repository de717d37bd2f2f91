"""``tepo doctor``: what this machine has and lacks, and what that enables."""
