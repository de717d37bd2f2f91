"""Launches a run on a cluster through NeMo-Run. Imports no torch."""
