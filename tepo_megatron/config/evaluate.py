"""``evaluate``: held-out problems, in training and by ``tepo eval``."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.data import FieldsConfig, PromptsConfig


class SetSamplingConfig(Section):
    """Sampling for a set; defaults are those of ``rollout.sampling``. Greedy uses only the length. Any truncation is possible,
    since nothing is trained on."""

    temperature: Annotated[float | None, Field(ge=0.01, le=2)] = None
    """Sampling temperature. Default: ``rollout.sampling.temperature``."""

    max_new_tokens: PositiveInt | None = None
    """Largest response in tokens. Default: ``rollout.sampling.max_new_tokens``."""

    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling: probability that the kept tokens reach; 1: all. Default: ``rollout.sampling.top_p``."""

    top_k: NonNegativeInt | None = None
    """This many likeliest tokens; 0: all. Default: ``rollout.sampling.top_k``."""

    min_p: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Tokens with at least this fraction of the likeliest one's probability; 0: all. Default: ``rollout.sampling.min_p``."""

    @property
    def truncation(self) -> dict[str, float | int | None]:
        """Given ``top_p``, ``top_k`` and ``min_p``, in the sampler's form: a ``top_k`` of None is all."""
        bounds = {"top_p": self.top_p, "min_p": self.min_p}
        args: dict[str, float | int | None] = {name: value for name, value in bounds.items() if value is not None}
        return args if self.top_k is None else {**args, "top_k": self.top_k or None}


class EvaluationSetConfig(PromptsConfig):
    path: Annotated[str, Field(min_length=1)]
    """Problems of the set, in the form of ``data.heldout``; never trained on."""

    sha256: Annotated[str | None, Field(pattern="^[0-9a-f]{64}$")] = None
    """Expected digest of the file, from ``tepo data prepare``. null: not checked."""

    verifier: str | None = None
    """Scores the responses, as ``reward.verifier``, with the limits of ``reward`` but not its ``kwargs`` or ``weights``. null:
    the run's own."""

    chat_template: bool | None = None
    """As ``data.chat_template``, for this set. null: the same."""

    fields: FieldsConfig | None = None
    """As ``data.fields``, for this set. null: the same; likewise ``template`` and ``system_prompt``."""

    split: str | None = None
    """Split of a folder, such as ``test``. null: the only one."""

    every: NonNegativeInt | None = None
    """As ``evaluate.every``, such as less often for a large set. null: the same. ``tepo eval`` ignores it."""

    problems: PositiveInt | None = None
    """Use the first so many problems. Default: all."""

    greedy: bool = True
    """Also answer each problem greedily."""

    samples: NonNegativeInt | None = None
    """n, the samples per problem. null: ``evaluate.samples``."""

    k: tuple[PositiveInt, ...] | None = None
    """The k of pass@k and maj@k, estimated from the samples; each at most ``samples``. null: ``samples`` alone."""

    sampling: SetSamplingConfig = SetSamplingConfig()

    majority: Literal["auto", "verifier", "text", "none"] = "auto"
    """When answers are equal for maj@k. ``verifier``: it accepts one for the other. ``text``: equal final answers, up to
    spaces, case and the like. ``auto``: ``verifier`` for exact, last_word, last_number and math, ``none`` for python_tests and
    stack_machine, else ``text``. ``none``: no maj@k."""

    correct_at: Annotated[float | None, Field(allow_inf_nan=False)] = None
    """As ``evaluate.correct_at``, for this set. null: the same."""

    show: NonNegativeInt | None = None
    """As ``evaluate.show``, for this set. null: the same."""

    @model_validator(mode="after")
    def _something_is_sampled(self) -> "EvaluationSetConfig":
        if not self.greedy and self.samples == 0:
            raise ValueError("greedy = false with samples = 0 leaves nothing to answer; set one of them")
        if self.k is not None and len(set(self.k)) < len(self.k):
            raise ValueError("k names a number twice; leave one out")
        return self


_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


class EvaluateConfig(Section):
    every: NonNegativeInt = 10
    """Evaluate before the first step, after every multiple of this, and after the last; 0: never."""

    problems: PositiveInt | None = None
    """Use the first so many held-out problems. Default: all."""

    samples: NonNegativeInt = 4
    """k, samples per problem for avg@k and pass@k, by ``rollout.sampling``; 0: greedy only. Its stop strings and bad words
    apply to greedy too."""

    correct_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """A response is correct from this reward on. Lower it for rewards that seldom reach 1; mean rewards (``heldout/…``) do not
    depend on it."""

    show: NonNegativeInt = 32
    """First problems of each evaluation written to ``samples.jsonl``, with responses, rewards and failures; ``tepo samples``
    shows them."""

    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Further problems by name, each with own verifier and sampling: ``evaluate.sets.aime.path=aime.jsonl``. Metrics:
    ``eval/NAME/…``."""

    def every_of(self, name: str | None) -> int:
        """``every`` of a set; None: of ``data.heldout``."""
        every = None if name is None else self.sets[name].every
        return self.every if every is None else every

    def is_due(self, name: str | None, step: int, last_step: int) -> bool:
        """Whether a set (None: ``data.heldout``) is evaluated after ``step`` steps of ``last_step``."""
        every = self.every_of(name)
        return bool(every) and (step % every == 0 or step == last_step)

    def any_due(self, step: int, last_step: int) -> bool:
        return any(self.is_due(name, step, last_step) for name in (None, *self.sets))

    @property
    def paths(self) -> dict[str, str]:
        """Paths of the problems, by set name."""
        return {name: item.path for name, item in self.sets.items()}

    def with_paths(self, change: Mapping[str, str]) -> "EvaluateConfig":
        moved = {name: self.sets[name].model_copy(update={"path": path}) for name, path in change.items()}
        return self.model_copy(update={"sets": {**self.sets, **moved}})

    @field_validator("sets")
    @classmethod
    def _sets_have_names(cls, sets: Mapping[str, EvaluationSetConfig]) -> Mapping[str, EvaluationSetConfig]:
        for name in sets:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(
                    f"{name[:60]!r} cannot name a set, whose metrics are eval/NAME/…: a name has letters, digits, - and _, 40 "
                    "at most"
                )
        return sets

    @model_validator(mode="after")
    def _enough_is_sampled(self) -> "EvaluateConfig":
        for name, item in self.sets.items():
            samples = self.samples if item.samples is None else item.samples
            if not item.greedy and not samples:
                raise ValueError(f"evaluate.sets.{name}: greedy = false with evaluate.samples = 0 leaves nothing to answer")
            if item.k is not None and max(item.k, default=0) > samples:
                raise ValueError(
                    f"evaluate.sets.{name}.k = {max(item.k)} cannot be estimated from {samples} samples; raise its samples"
                )
        return self
