"""Measurements that a page quotes, run by ``python -m tepo_megatron.tools.bench.studies.NAME``."""
