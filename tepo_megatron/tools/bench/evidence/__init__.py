"""The comparison of objectives: what is kept of the runs, and the page that is made from it."""
