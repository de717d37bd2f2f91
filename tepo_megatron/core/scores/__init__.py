"""Log-prob and entropy of sharded logits."""

from tepo_megatron.core.scores.fused_linear import fused_linear_logprob_and_entropy, logprob_and_entropy

__all__ = ["fused_linear_logprob_and_entropy", "logprob_and_entropy"]
