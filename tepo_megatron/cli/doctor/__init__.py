"""What this machine and environment have, what they lack, and what it would enable: ``tepo doctor``."""
