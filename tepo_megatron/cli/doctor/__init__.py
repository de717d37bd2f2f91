"""``tepo doctor``: what this machine and environment have, what is missing, and what it would enable."""
