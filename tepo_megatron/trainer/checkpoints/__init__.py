"""A checkpoint's folder, and whether a run may continue from it."""
