"""Kinds of the user's own for the choices of an objective: the classes that theirs are made of. docs/guides/own-objective.md.

A kind is one class: its fields are its section of the configuration, its methods compute. They take and give tensors; nothing
here names their types, since this package is read where there is no torch. Axes in names: S sequences, T tokens.
"""

from typing import Any, ClassVar

from tepo_megatron.config.base import Section


class OwnKind(Section):
    """What all kinds of one's own have in common. A kind is a subclass of one of the classes below, with its name as a field:
    ``kind: Literal["my_kind"] = "my_kind"``.
    """

    slot: ClassVar[str]
    """The field below ``objective`` that takes the kind."""

    defines: ClassVar[str]
    """The method that a kind has to define."""

    kind: str
    """The kind's name."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads ``values.reference_delta_T``: then a frozen copy of the run's first weights is kept, and scored."""
        return False


class OwnAdvantage(OwnKind):
    """A way to turn rewards into advantages."""

    slot: ClassVar[str] = "advantage"
    defines: ClassVar[str] = "advantages"

    def advantages(self, batch: Any) -> Any:
        """One advantage for each response of a whole rollout batch.

        Args:
            batch: `Batch` with ``rewards_S`` fp32, ``groups_S`` int64 (equal numbers make a group), ``loss_mask_T``, and
                ``reward_parts_SK`` where the verifier returns components.

        Returns:
            float [S], finite; no gradient is kept. It must not depend on the order of the responses.
        """
        raise NotImplementedError


class OwnRatio(OwnKind):
    """A level at which π_θ is compared with π_old."""

    slot: ClassVar[str] = "ratio"
    defines: ClassVar[str] = "log_ratio"

    def log_ratio(self, values: Any) -> Any:
        """The logarithm of the ratio at every token of a micro-batch, [T], differentiable.

        ``values``: `TokenValues`; its ``delta_T`` is log π_θ − log π_old, 0 outside the loss mask (and bounded already, under
        the trust region ``log_clip``).
        """
        raise NotImplementedError


class OwnTrustRegion(OwnKind):
    """A bound on how far a ratio carries the surrogate."""

    slot: ClassVar[str] = "trust_region"
    defines: ClassVar[str] = "surrogate"

    def surrogate(self, ratio_T: Any, values: Any) -> Any:
        """What is maximised at each token of a micro-batch, differentiable.

        ``ratio_T``: what ``objective.ratio`` gives, [T]. ``values``: `TokenValues`, of which ``advantage_T`` is the response's
        advantage at each of its tokens.

        Returns:
            [T]; or a `Surrogate`, which also says where a bound held, for the metrics ``clip/low`` and ``clip/high``.
        """
        raise NotImplementedError


class OwnAggregation(OwnKind):
    """A way to make one number of the values of the tokens: what each counts, and what their sum is divided by."""

    slot: ClassVar[str] = "aggregation"
    defines: ClassVar[str] = "denominator"

    def sequence_weights(self, lengths_S: Any) -> Any:
        """What each response token of a sequence counts in the sum, [S]; 1 unless defined otherwise.

        ``lengths_S``: the response tokens of the sequences of a micro-batch, floating point; a sequence may have none.
        """
        return lengths_S * 0 + 1

    def denominator(self, lengths_S: Any) -> Any:
        """What the sum over all micro-batches and ranks is divided by, once: a positive scalar.

        ``lengths_S``: the response tokens of every sequence of the optimizer step, of all ranks, floating point. Those without
        one are padding, and must change nothing.
        """
        raise NotImplementedError


class OwnMismatch(OwnKind):
    """Weights for a sampler whose probabilities differ from the trainer's."""

    slot: ClassVar[str] = "mismatch"
    defines: ClassVar[str] = "importance_weights"

    def importance_weights(self, values: Any) -> Any:
        """What multiplies the surrogate at every token of a micro-batch, [T]; no gradient flows through it.

        ``values``: `TokenValues`; its ``mismatch_T`` is log π_old − log π_sampler, 0 outside the loss mask.
        """
        raise NotImplementedError


class _OwnTerm(OwnKind):
    def prepare(self, step: Any) -> Any:
        """What has to be known of the whole optimizer step, such as a threshold: ``found`` of ``choose`` and ``penalty``.

        ``step``: `StepValues`, all response tokens of the step on every rank. Nothing unless defined otherwise.
        """
        del step


class OwnMask(_OwnTerm):
    """Takes the gradient of the surrogate at tokens that it chooses. The value there stays."""

    slot: ClassVar[str] = "mask"
    defines: ClassVar[str] = "choose"

    def choose(self, values: Any, found: Any) -> Any:
        """The tokens of a micro-batch that get no gradient, bool [T]; those outside the loss mask do not count.

        ``values``: `TokenValues`; ``found``: what ``prepare`` gave.
        """
        raise NotImplementedError


class OwnPenalty(_OwnTerm):
    """A term that is subtracted from the surrogate."""

    slot: ClassVar[str] = "penalty"
    defines: ClassVar[str] = "penalty"

    def choose(self, values: Any, found: Any) -> Any:
        """The tokens of a micro-batch that are penalised, bool [T]; every response token unless defined otherwise."""
        del values, found

    def penalty(self, values: Any, found: Any) -> Any:
        """What is subtracted at each token of a micro-batch, [T], coefficient included, differentiable.

        ``values``: `TokenValues`; ``found``: what ``prepare`` gave. It counts at the tokens that ``choose`` gave only, but
        must be finite at all, in value and gradient.
        """
        raise NotImplementedError


OWN_KINDS: tuple[type[OwnKind], ...] = (
    OwnAdvantage,
    OwnRatio,
    OwnTrustRegion,
    OwnAggregation,
    OwnMismatch,
    OwnMask,
    OwnPenalty,
)
"""What a kind of one's own can be a subclass of."""
