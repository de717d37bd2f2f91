"""The trainer on Megatron-Core: the only importer of megatron.core."""
