"""Computes log-prob and entropy of logits that are sharded over the vocabulary. Process groups are arguments."""

from tepo_megatron.core.scores.fused_linear import fused_linear_logprob_and_entropy
from tepo_megatron.core.scores.scores import logprob_and_entropy

__all__ = ["fused_linear_logprob_and_entropy", "logprob_and_entropy"]
