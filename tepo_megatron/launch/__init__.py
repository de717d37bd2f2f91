"""Launches runs on clusters through NeMo-Run. Imports no torch."""
