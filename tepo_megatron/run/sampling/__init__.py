"""Who samples when."""
