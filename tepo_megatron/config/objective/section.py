"""The objective: four choices, optional terms, and a preset under them."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from pydantic import model_validator

from tepo_megatron.config.base import Section, merge_sections
from tepo_megatron.config.objective import choices, terms
from tepo_megatron.config.objective.choices import Clip, ClipCov
from tepo_megatron.config.objective.custom import CustomKind, Need, ObjectiveSection, OwnRatio, Plugin
from tepo_megatron.config.objective.presets import PRESETS, Preset


class ObjectiveConfig(Section):
    """A preset, with overrides: a given section is merged over the preset's, field by field.

    Another ``kind`` drops the fields of the preset's kind; ``null`` switches a term off.
    """

    preset: str = "tepo"
    """A name from ``tepo objective list``, or a ``my_preset.yaml`` (relative to the run's file)."""

    plugins: tuple[str, ...] = ()
    """Modules with custom kinds to import: ``my_objective.py`` (relative to the run's file), or an installed one."""

    advantage: choices.Advantage = choices.GROUP
    """How rewards become advantages A, one per response."""

    ratio: choices.Ratio = choices.SEQUENCE_TOKEN
    """Level at which π_θ is compared with π_old. Our interpretation of TEPO: the sequence ratio's token form."""

    trust_region: choices.TrustRegion = Clip(scale="length", low=0.026, high=0.035)
    """How far a ratio may carry the surrogate from 1. Our interpretation of TEPO."""

    aggregation: choices.Aggregation = choices.TOKEN_MEAN
    """How token values become one number: weights and divisor."""

    kl_mask: terms.KLMask | None = terms.KLMask()
    """TEPO's KL penalty on tokens with positive advantage and falling entropy; null: off."""

    kl: terms.KL | None = None
    """A KL penalty on all response tokens."""

    kl_cov: terms.KLCov | None = None
    """A KL penalty on tokens of highest covariance (KL-Cov)."""

    distill: terms.Distill | None = None
    """A divergence from a teacher at all response tokens."""

    entropy: terms.EntropyBonus | None = None
    """A bonus for the full distribution's entropy."""

    mismatch: terms.Mismatch | None = None
    """Weights for a sampler whose probabilities differ; default kind ``truncate``."""

    rejection: terms.Rejection | None = None
    """The surrogate leaves out samples whose sampler probabilities differ too much."""

    opsm: terms.OffPolicySequenceMask | None = None
    """The surrogate leaves out responses of negative advantage that the policy has left (OPSM)."""

    m2po: terms.SecondMomentMask | None = None
    """The surrogate leaves out tokens on which trainer and sampler differ most (M2PO)."""

    mask: terms.Mask | None = None
    """Your mask, from ``plugins``: chosen tokens lose the surrogate's gradient."""

    penalty: terms.Penalty | None = None
    """Your penalty, from ``plugins``, subtracted from the surrogate."""

    @property
    def sections(self) -> dict[str, ObjectiveSection]:
        """Sections that are on, by field."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, ObjectiveSection)}

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset().union(*(section.needs for section in self.sections.values()))

    @property
    def needs_reference(self) -> bool:
        """True if a frozen copy of the first weights is scored."""
        return "reference" in self.needs

    @property
    def compares_responses(self) -> bool:
        """True if nothing is learned from one response per prompt."""
        return self.distill is None and self.advantage.kind in choices.COMPARE_REWARDS | {"gdpo"}

    @property
    def teacher_top_k(self) -> int:
        """How many tokens a served teacher must name; 0: none."""
        return self.distill.k if self.distill is not None and self.distill.of == "top_k" else 0

    @property
    def plugin_digests(self) -> dict[str, str]:
        return {PurePath(plugin.name).name: plugin.digest for plugin in map(Plugin.load, self.plugins)}

    @property
    def selects_tokens(self) -> bool:
        return any(section.selects_tokens for section in self.sections.values())

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        name = raw.get("preset", "tepo")
        preset = Preset.find(name)
        base = preset.base or name
        defaults = {key: field.default for key, field in cls.model_fields.items() if isinstance(field.default, Section)}
        merged = merge_sections({key: section.model_dump() for key, section in defaults.items()}, PRESETS[base].changes)
        for level in (preset.changes, raw) if preset.base else (raw,):
            _check_empty_sections(level, merged)
            merged = merge_sections(merged, level)
            for key, kind in (("entropy", "fixed"), ("mismatch", "truncate")):
                if isinstance(merged.get(key), Mapping):
                    merged[key] = {"kind": kind, **merged[key]}
        plugins = raw.get("plugins", ())
        if isinstance(plugins, list | tuple) and all(isinstance(item, str) for item in plugins):
            used = [item for item in preset.plugins if _uses(Plugin.load(item), merged)]
            merged["plugins"] = tuple(dict.fromkeys([*used, *(Plugin.load(item).name for item in plugins)]))
        return {**merged, "preset": base}

    def _faults(self) -> Iterator[str]:
        for plugin in map(Plugin.load, self.plugins):
            if not _uses(plugin, self.model_dump()):
                kinds = ", ".join(f"objective.{kind.slot}.kind = {kind.kind_name()}" for kind in plugin.kinds)
                yield f"objective.plugins names {plugin.name}, and nothing of it is used; set {kinds}, or leave it out"
        ratio, region = self.ratio, self.trust_region
        # a mean of a response's tokens stays near 1
        is_mean = not isinstance(ratio, OwnRatio) and getattr(ratio, "length_normalized", ratio.kind == "power_mean")
        with_ratio = f"objective.ratio.kind = {ratio.kind!r}"
        if self.advantage.kind == "teacher" and ratio.kind in ("sequence", "power_mean"):
            yield (
                f"objective.advantage.kind = 'teacher' with {with_ratio}: each token has an advantage of its own, and a "
                "ratio shared by a response would average them; set objective.ratio.kind = 'token' or 'sequence_token'"
            )
        if region.kind == "length_clip" and (is_mean or ratio.kind in ("token", "prefix")):
            yield (
                f"objective.trust_region.kind = 'length_clip' with {with_ratio}: its bound grows as a sum of log-ratios does; "
                "set objective.ratio.kind = 'sequence' and objective.ratio.length_normalized = false"
            )
        if isinstance(region, Clip) and region.scale == "length":
            if isinstance(ratio, OwnRatio) or ratio.kind == "token":
                yield (
                    f"objective.trust_region.scale = length with {with_ratio}: a token's ratio does not depend on the length; "
                    "set objective.ratio.kind = sequence_token or prefix, or objective.trust_region.scale = fixed"
                )
            for name, value in (("low", region.low), ("high", region.high)):
                if value != "auto" and not 0.01 <= value <= 0.15:
                    effect = "hardly anything lies within" if value < 0.01 else "hardly a response reaches it"
                    advice = f"is in units of a token's log-ratio: {effect}; 0.03 is usual, or give scale = fixed for 1 ∓ bound"
                    warnings.warn(f"objective.trust_region.{name} = {value:g} with scale = length {advice}", stacklevel=2)
        elif isinstance(region, Clip | ClipCov):
            widest = max(value for value in (region.low, region.high) if value != "auto")
            advice = f"{with_ratio} with a trust region of {widest:g}"
            if is_mean and widest > 0.05:
                warnings.warn(f"{advice}: such ratios stay within about 1e-3 of 1; 3e-4 is usual", stacklevel=2)
            elif ratio.kind == "token" and widest < 0.05:
                warnings.warn(f"{advice}: token ratios leave that range at once; 0.2 is usual", stacklevel=2)

    def idle_in_first_update(self) -> Iterator[tuple[str, str]]:
        for name, term in (("kl_mask", self.kl_mask), ("kl", self.kl), ("kl_cov", self.kl_cov)):
            if term is not None and term.against == "old" and term.estimator != "k1":  # at 0 only k1 has a gradient
                yield name, "the KL from the policy before it is 0"
            elif isinstance(term, terms.KLMask) and term.falling == "measured":
                yield name, "no entropy has fallen yet"
        if self.opsm is not None:
            yield "opsm", "no response is less likely yet"


def _check_empty_sections(raw: Mapping[str, Any], preset: Mapping[str, Any]) -> None:
    """An empty section would switch its term on, but seems to do nothing."""
    for key in ObjectiveConfig.model_fields:
        value = raw.get(key)
        if isinstance(value, Mapping) and not value and preset.get(key) is None:
            raise ValueError(
                f"objective.{key} = {{}} does not say what it switches on; give one of its fields ('tepo config schema "
                f"objective.{key}' lists them), or null"
            )


def _uses(plugin: Plugin, sections: Mapping[str, Any]) -> bool:
    """``sections`` are mappings, or built kinds."""
    built = {key: section.kind for key, section in sections.items() if isinstance(section, CustomKind)}
    used = built | {key: section.get("kind") for key, section in sections.items() if isinstance(section, Mapping)}
    return any(used.get(kind.slot) == kind.kind_name() for kind in plugin.kinds)
