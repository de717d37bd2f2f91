"""The objective: four choices, optional terms, and a preset under them."""

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.choices import (
    Advantage,
    Aggregation,
    Clip,
    ClipCov,
    GroupAdvantage,
    LengthClip,
    PowerMeanRatio,
    Ratio,
    SequenceTokenRatio,
    TokenMean,
    TokenRatio,
    TrustRegion,
)
from tepo_megatron.config.objective.custom import CustomKind, Need, ObjectiveSection, OwnRatio, kind_name, load_plugin
from tepo_megatron.config.objective.presets import PRESETS, is_preset_file, read_preset
from tepo_megatron.config.objective.terms import (
    KL,
    EntropyBonus,
    KLCov,
    KLMask,
    Mask,
    Mismatch,
    OffPolicySequenceMask,
    Penalty,
    Rejection,
    SecondMomentMask,
)


class ObjectiveConfig(Section):
    """A preset, with overrides: a given section is merged over the preset's, field by field.

    Another ``kind`` drops the fields of the preset's kind; ``null`` switches a term off.
    """

    preset: str = "tepo"
    """A name from ``tepo objective list``, or your ``my_preset.yaml`` (relative to the run's file), over its preset."""

    plugins: tuple[str, ...] = ()
    """Modules with custom kinds: ``my_objective.py`` (relative to the run's file), or an installed one. They are imported."""

    advantage: Advantage = GroupAdvantage()
    """How rewards become advantages A, one per response."""

    ratio: Ratio = SequenceTokenRatio()
    """Level at which π_θ is compared with π_old. Our interpretation of TEPO: the sequence ratio's token form."""

    trust_region: TrustRegion = Clip(low=3e-4, high=4e-4)
    """How far a ratio may carry the surrogate from 1. Our interpretation of TEPO: GSPO's range."""

    aggregation: Aggregation = TokenMean()
    """How token values become one number: weights and divisor."""

    kl_mask: KLMask | None = KLMask()
    """TEPO's KL penalty on tokens with positive advantage and falling entropy; null: off."""

    kl: KL | None = None
    """A KL penalty on every response token; null: off."""

    kl_cov: KLCov | None = None
    """A KL penalty on the tokens of highest covariance (KL-Cov); null: off."""

    entropy: EntropyBonus | None = None
    """A bonus for the full distribution's entropy; null: off."""

    mismatch: Mismatch | None = None
    """Weights for a sampler whose probabilities differ from the trainer's; default kind ``truncate``; null: off."""

    rejection: Rejection | None = None
    """Leaves out samples whose sampler probabilities differ too much from the trainer's; null: off."""

    opsm: OffPolicySequenceMask | None = None
    """Leaves out responses of negative advantage that the policy has left (OPSM); null: off."""

    m2po: SecondMomentMask | None = None
    """Leaves out the tokens on which trainer and sampler differ most (M2PO); null: off."""

    mask: Mask | None = None
    """Your mask, from ``plugins``: chosen tokens get no gradient; null: off."""

    penalty: Penalty | None = None
    """Your penalty, from ``plugins``, subtracted from the surrogate; null: off."""

    @property
    def sections(self) -> dict[str, ObjectiveSection]:
        """The sections that are on, by field."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, ObjectiveSection)}

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset().union(*(section.needs for section in self.sections.values()))

    @property
    def needs_reference(self) -> bool:
        """True if a frozen copy of the first weights is kept and scored."""
        return "reference" in self.needs

    @property
    def selects_tokens(self) -> bool:
        return any(section.selects_tokens for section in self.sections.values())

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        name = raw.get("preset", "tepo")
        file = read_preset(name) if isinstance(name, str) and is_preset_file(name) else None
        if file is not None:
            name = file.base
        if not isinstance(name, str) or name not in PRESETS:
            nearest = max(PRESETS, key=lambda known: _likeness(str(name), known))
            raise ValueError(
                f"objective.preset = {str(name)[:60]!r} is unknown; the nearest is {nearest!r}. Known: "
                f"{', '.join(PRESETS)}, or a file of your own, my_preset.yaml"
            )
        levels = [PRESETS[name].changes, *([] if file is None else [file.preset.changes]), raw]
        sections = {key: field.default for key, field in cls.model_fields.items() if isinstance(field.default, Section)}
        merged: dict[str, Any] = {key: section.model_dump() for key, section in sections.items()}
        for level in levels:
            if level is not levels[0]:
                _check_empty_sections(level, merged)
            merged = _merge(merged, level)
        plugins = raw.get("plugins", ())
        if isinstance(plugins, list | tuple) and all(isinstance(item, str) for item in plugins):
            inherited = () if file is None else file.plugins
            used = (item for item in inherited if _uses(load_plugin(item).kinds, merged))
            merged["plugins"] = tuple(dict.fromkeys([*used, *(load_plugin(item).name for item in plugins)]))
        return {**merged, "preset": name}

    def _faults(self) -> Iterator[str]:
        for plugin in map(load_plugin, self.plugins):
            if not _uses(plugin.kinds, self.model_dump()):
                kinds = ", ".join(f"objective.{kind.slot}.kind = {kind_name(kind)}" for kind in plugin.kinds)
                yield f"objective.plugins names {plugin.name}, and nothing of it is used; set {kinds}, or leave it out"
        if isinstance(self.trust_region, LengthClip) and (self.ratio.kind in ("token", "prefix") or _is_normalized(self.ratio)):
            yield (
                f"objective.trust_region.kind = 'length_clip' with objective.ratio.kind = {self.ratio.kind!r}: its bound grows "
                "with the length, as a sum of log-ratios does; set objective.ratio.kind = 'sequence' and "
                "objective.ratio.length_normalized = false"
            )
        region = self.trust_region
        if isinstance(region, Clip) and region.scale == "length":
            yield from self._length_scale_faults(region)
            return
        if not isinstance(region, Clip | ClipCov):
            return
        widest = max(value for value in (region.low, region.high) if value != "auto")
        advice = f"objective.ratio.kind = {self.ratio.kind!r} with a trust region of {widest:g}"
        if _is_normalized(self.ratio) and widest > 0.05:
            warnings.warn(f"{advice}: such ratios stay within about 1e-3 of 1; 3e-4 is usual, 0.2 hardly clips", stacklevel=2)
        elif isinstance(self.ratio, TokenRatio) and widest < 0.01:
            warnings.warn(f"{advice}: token ratios leave that range at once; 0.2 is usual", stacklevel=2)

    def _length_scale_faults(self, region: Clip) -> Iterator[str]:
        if isinstance(self.ratio, TokenRatio | OwnRatio):
            yield (
                f"objective.trust_region.scale = length with objective.ratio.kind = {self.ratio.kind!r}: the spread of a "
                "token's ratio does not depend on the length; set objective.ratio.kind = sequence_token or prefix, or "
                "objective.trust_region.scale = fixed"
            )
        for name in ("low", "high"):
            value = getattr(region, name)
            if value != "auto" and not 0.003 <= value <= 0.5:
                effect = "hardly anything lies within" if value < 0.003 else "hardly a response reaches it"
                warnings.warn(
                    f"objective.trust_region.{name} = {value:g} with scale = length is in units of a token's log-ratio: "
                    f"{effect}; 0.03 is usual, and auto fits it to the run",
                    stacklevel=2,
                )


def _check_empty_sections(raw: Mapping[str, Any], preset: Mapping[str, Any]) -> None:
    """An empty section would switch its term on, but looks as if it did nothing."""
    for key in ObjectiveConfig.model_fields:
        value = raw.get(key)
        if isinstance(value, Mapping) and not value and preset.get(key) is None:
            raise ValueError(
                f"objective.{key} = {{}} does not say what it switches on; give one of its fields ('tepo config schema "
                f"objective.{key}' lists them), or null"
            )


def _is_normalized(ratio: Ratio) -> bool:
    """A mean over a response's tokens stays near 1."""
    if isinstance(ratio, CustomKind):
        return False
    return isinstance(ratio, PowerMeanRatio) or (not isinstance(ratio, TokenRatio) and ratio.length_normalized)


def _uses(kinds: Sequence[type[CustomKind]], sections: Mapping[str, Any]) -> bool:
    used = {(key, section["kind"]) for key, section in sections.items() if isinstance(section, Mapping) and "kind" in section}
    used |= {(key, section.kind) for key, section in sections.items() if isinstance(section, CustomKind)}
    return any((kind.slot, kind_name(kind)) in used for kind in kinds)


def _likeness(name: str, known: str) -> tuple[float, bool]:
    return difflib.SequenceMatcher(None, name, known).ratio(), sorted(name) == sorted(known)


_KIND_UNLESS_GIVEN = {"entropy": "fixed", "mismatch": "truncate"}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of the same kind merge field by field; another kind replaces the section."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if not isinstance(value, Mapping):
            merged[key] = value
        elif isinstance(below, Mapping) and value.get("kind", below.get("kind")) == below.get("kind"):
            merged[key] = _merge(below, value)
        elif key in _KIND_UNLESS_GIVEN:
            merged[key] = {"kind": _KIND_UNLESS_GIVEN[key], **value}
        else:
            merged[key] = dict(value)
    return merged
