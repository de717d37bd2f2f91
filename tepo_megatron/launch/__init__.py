"""Plans a run on a cluster, then launches it through NeMo-Run. Imports no torch."""
