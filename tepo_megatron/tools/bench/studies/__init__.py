"""Measurements for a page, run by ``python -m tepo_megatron.tools.bench.studies.NAME``."""
