"""A run on a cluster: planned on paper, then launched through NeMo-Run. No torch."""
