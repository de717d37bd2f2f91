"""The comparison of objectives: metrics kept from the runs, and the page made from them."""
