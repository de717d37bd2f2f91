"""Single measurements that a page quotes, each a module to run: ``python -m tepo_megatron.tools.bench.studies.NAME``."""
