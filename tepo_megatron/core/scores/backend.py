import functools
import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from tepo_megatron.core.scores import native
from tepo_megatron.core.scores.shard import Gradients, LocalLabels, Logits, RowScores, Scoring, divergence_of, mapped, outcomes
from tepo_megatron.core.scores.torch_sweep import IN_TORCH, RowSweeps

BackendName = Literal["auto", "torch", "cpp", "triton"]

_IN_CPP = RowSweeps(native.forward, native.mixture, native.backward)


class Backend(Protocol):
    """The passes over a shard [T, Vp]. No collective."""

    def statistics(self, logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
        """Writes the statistics of `combine` into contiguous [R, K], fp32 (fp64 for fp64)."""

    def mixture(self, logits: Logits, scoring: Scoring, scores: RowScores, sums_R2: Tensor) -> None:
        """Writes the shard's part of KL(student ‖ m) and of KL(teacher ‖ m) into [R, 2], with m of ``jsd``."""

    def gradient(self, logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TVp: Tensor) -> None:
        """Writes all of ``out_TVp``, zeros for padding and masked rows. It may be the logits or have another dtype."""


def get_backend(name: BackendName, device: torch.device, *, few_tokens: bool = False, top_k: bool = False) -> Backend:
    """Raises ValueError for an unusable backend. On a CPU ``triton`` needs its interpreter."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _has_triton() else "torch"
        name = _fastest_on_cpu() if device.type == "cpu" else name
    backend: Backend = IN_TORCH
    if name == "triton":
        backend = _in_triton(device)
    elif name == "cpp":
        if device.type != "cpu":
            raise ValueError(f"backend = 'cpp' is for logits on CPU, these are on {device}; use backend = 'auto'")
        backend = _IN_CPP
    elif name != "torch":
        raise ValueError(f"backend = {name!r} is unknown; known: auto, torch, cpp, triton")
    if top_k:
        return _TopK(backend)
    return _KeptTokens() if few_tokens else backend


@functools.cache
def _fastest_on_cpu() -> BackendName:
    try:
        native.library()
        return "cpp"
    except RuntimeError as error:
        logging.getLogger(__name__).warning("scores are computed in torch, two to three times slower than in C++: %s", error)
        return "torch"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _in_triton(device: torch.device) -> Backend:
    if not _has_triton():
        raise ValueError(
            "backend = 'triton', but triton is not installed; install it (pip install triton==3.7.1, 690 MB), or use "
            "backend = 'torch'"
        )
    from tepo_megatron.core.scores import triton_sweep

    if device.type != "cuda" and not triton_sweep.IS_INTERPRETED:
        raise ValueError(
            f"backend = 'triton' is for logits on a GPU, these are on {device}; use backend = 'auto', or for a test start the "
            "process with TRITON_INTERPRET=1"
        )
    return triton_sweep


class _WithoutMixture:
    def mixture(self, *_: object) -> None:
        raise NotImplementedError


class _KeptTokens(_WithoutMixture):
    """Scores kept tokens: rows [R, 1 + K], label first, −inf for columns elsewhere. `Scoring.plan` refuses a teacher."""

    def statistics(self, logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
        if not scoring.count:
            return
        picked_RC, _, inside_RC = _pick(logits.student, scoring)
        IN_TORCH.forward(Logits(picked_RC), replace(scoring, rows_R=None), stats_RK)
        stats_RK[:, 3] = torch.where(inside_RC[:, 0], picked_RC[:, 0], 0.0)

    def gradient(self, logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TVp: Tensor) -> None:
        if not scoring.count:
            out_TVp.zero_()
            return
        picked_RC, column_RC, _ = _pick(logits.student, scoring)  # before the gradient may take the logits' place
        labels = LocalLabels(torch.zeros_like(scoring.labels.column_R), scoring.labels.inside_R)
        rows = replace(scoring, rows_R=None, labels=labels)
        IN_TORCH.backward(Logits(picked_RC), rows, scores, mapped(gradients, scoring.of_rows), picked_RC)
        # Each column is in a row once; a −inf outside this shard adds its gradient, 0, to column 0.
        out_TVp.zero_()
        out_TVp.index_put_((scoring.token_R.unsqueeze(1), column_RC), picked_RC.to(out_TVp.dtype), accumulate=True)


@dataclass(frozen=True)
class _TopK(_WithoutMixture):
    """Adds a teacher's top k to another backend, whose gradient it corrects in their columns, the label's and the first."""

    plain: Backend

    def statistics(self, logits: Logits, scoring: Scoring, stats_RK: Tensor) -> None:
        assert scoring.top is not None
        plain, tokens = scoring.without_top, scoring.top.tokens
        whole_RK = stats_RK.new_empty(scoring.count, plain.statistics)
        self.plain.statistics(logits, plain, whole_RK)
        stats_RK[:, : plain.statistics] = whole_RK
        picked_RK = logits.student[scoring.token_R.unsqueeze(1), tokens.column_R].to(stats_RK.dtype)
        stats_RK[:, plain.statistics :] = torch.where(tokens.inside_R, picked_RK, 0.0)

    def gradient(self, logits: Logits, scoring: Scoring, scores: RowScores, gradients: Gradients, out_TVp: Tensor) -> None:
        """∂/∂logit is w − p Σw in a column of the top k and p (w/p of the rest − Σw) in another one: no difference of large
        numbers where the rest is small.
        """
        assert scoring.top is not None
        assert scores.top_logprob_RK is not None
        if gradients.divergence is None or not scoring.count:
            plain = gradients._replace(divergence=None)
            self.plain.gradient(logits, scoring.without_top, scores, plain, out_TVp)
            return
        logp_RO = outcomes(scores.top_logprob_RK)
        pull_RO = divergence_of(logp_RO, outcomes(scoring.top.logprob_RK), scoring.top.divergence)[1]
        grad_R = scoring.of_rows(gradients.divergence).double()
        pull_RO, total_R = grad_R.unsqueeze(1) * pull_RO, grad_R * pull_RO.sum(1)
        elsewhere_R = pull_RO[:, -1] / logp_RO[:, -1].exp()
        column_RC, of_label_RC, of_top_RC, in_top_RC = _corrected(scoring, pull_RO[:, :-1])
        rows_R1 = scoring.token_R.unsqueeze(1)
        shifted_RC = logits.student[rows_R1, column_RC].double() - scores.max_R.double().unsqueeze(1)  # before out is written
        logp_RC = shifted_RC / scoring.temperature - scores.log_sum_R.double().unsqueeze(1)
        of_logprob_R = torch.zeros_like(grad_R) if gradients.logprob is None else scoring.of_rows(gradients.logprob).double()
        whole_T = scoring.to_tokens((of_logprob_R + total_R - elsewhere_R).to(scores.logprob_R.dtype))
        self.plain.gradient(logits, scoring.without_top, scores, Gradients(whole_T, gradients.entropy), out_TVp)
        if not scoring.columns:
            return
        slope_RC = of_logprob_R.unsqueeze(1) * of_label_RC + of_top_RC
        slope_RC -= logp_RC.exp() * (of_logprob_R + total_R).unsqueeze(1)
        slope_RC += torch.where(in_top_RC, 0.0, logp_RC.exp() * elsewhere_R.unsqueeze(1))
        if gradients.entropy is not None:
            above_RC = torch.where(logp_RC.isfinite(), logp_RC.exp() * (logp_RC + scores.entropy_R.unsqueeze(1)), 0.0)
            slope_RC -= scoring.of_rows(gradients.entropy).unsqueeze(1) * above_RC
        out_TVp[rows_R1, column_RC] = (slope_RC / scoring.temperature).to(out_TVp.dtype)


def _corrected(scoring: Scoring, pull_RK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns [R, 2 + K]: columns (the first, the label's, those of the top k), 1 in the label's, a top token's pull, and
    whether it is one. A token of another shard has the first column, with the values of that: repeated columns agree.
    """
    assert scoring.top is not None
    (label_R, inside_R), (top_RK, in_shard_RK) = scoring.labels, scoring.top.tokens
    first_R2 = torch.stack([torch.zeros_like(label_R), label_R], 1)
    same_R2K = (first_R2.unsqueeze(2) == top_RK.unsqueeze(1)) & in_shard_RK.unsqueeze(1)
    pull_R2, in_top_R2 = (same_R2K * pull_RK.unsqueeze(1)).sum(2), same_R2K.any(2)
    column_RC = torch.cat([first_R2, top_RK], 1)
    of_top_RC = torch.cat([pull_R2, torch.where(in_shard_RK, pull_RK, pull_R2[:, :1])], 1)
    in_top_RC = torch.cat([in_top_R2, in_shard_RK | in_top_R2[:, :1]], 1)
    return column_RC, (column_RC == label_R.unsqueeze(1)) & inside_R.unsqueeze(1), of_top_RC, in_top_RC


def _pick(logits_TVp: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    assert scoring.kept_tokens is not None
    column_RC = torch.cat([scoring.labels.column_R.unsqueeze(1), scoring.kept_tokens.column_R], 1)
    inside_RC = torch.cat([scoring.labels.inside_R.unsqueeze(1), scoring.kept_tokens.inside_R], 1)
    values_RC = logits_TVp[scoring.token_R.unsqueeze(1), column_RC].to(torch.promote_types(logits_TVp.dtype, torch.float32))
    return values_RC.masked_fill(~inside_RC, -torch.inf), column_RC, inside_RC
