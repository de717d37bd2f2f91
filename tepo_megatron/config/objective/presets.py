from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import yaml

LARGEST_FILE = 2**20  # bytes; a configuration has a few thousand


class Preset(NamedTuple):
    """A name of `PRESETS`, or a file, which has a base."""

    source: str
    """The paper, and a peer with values that the paper lacks."""

    formula: str
    """Value to maximise at a token, and the sum's divisor. Notation: docs/reference/tepo.md."""

    changes: Mapping[str, Any]  # sections that differ from TEPO's, or from the base's
    base: str | None = None  # built-in preset under the file
    plugins: tuple[str, ...] = ()  # of the file: absolute paths, or module names


def _token(**changes: Any) -> Mapping[str, Any]:
    clip = {"kind": "clip", "low": 0.2, "high": 0.2}
    return {"ratio": {"kind": "token"}, "trust_region": clip, "kl_mask": None, **changes}


def _sequence(**changes: Any) -> Mapping[str, Any]:
    return {"ratio": {"kind": "sequence"}, "aggregation": {"kind": "sequence_mean"}, "kl_mask": None, **changes}


_BY_SEQUENCE = {"kind": "sequence_mean"}

PRESETS: Mapping[str, Preset] = {
    "tepo": Preset(
        "arXiv 2604.12736",
        "min(s A, clip(s, 1 − 3e-4, 1 + 4e-4) A) − 1[A > 0, H falls] KL; s = sg[s_i] r / sg[r]; ÷ Σ T",
        {},
    ),
    "tepo_markov": Preset("arXiv 2510.09369", "tepo without the KL mask; ÷ Σ T", {"kl_mask": None}),
    "grpo": Preset("arXiv 2402.03300", "min(r A, clip(r, 0.8, 1.2) A); ÷ T_i, S", _token(aggregation=_BY_SEQUENCE)),
    "dapo": Preset(
        "arXiv 2503.14476",
        "min(r A, clip(r, 0.8, 1.28) A); ÷ Σ T",
        _token(trust_region={"kind": "clip", "low": 0.2, "high": 0.28}),
    ),
    "gspo": Preset("arXiv 2507.18071", "min(s_i A, clip(s_i, 1 − 3e-4, 1 + 4e-4) A); ÷ T_i, S", _sequence()),
    "gspo_token": Preset(
        "arXiv 2507.18071",
        "gspo with s = sg[s_i] r / sg[r]; ÷ T_i, S",
        {"aggregation": _BY_SEQUENCE, "kl_mask": None},
    ),
    "luspo": Preset(
        "arXiv 2602.05261; values TRL's",
        "T_i min(s_i A, clip(s_i, 1 − 2e-3, 1 + 2.5e-3) A); ÷ S",
        _sequence(
            trust_region={"kind": "clip", "low": 2e-3, "high": 2.5e-3},
            aggregation={"kind": "constant", "constant": 1.0, "per": "sequence"},
        ),
    ),
    "gmpo": Preset(
        "arXiv 2507.20673; verl",
        "exp(mean_t of min(δ, 0.4) if A > 0, max(δ, −0.4) if A < 0) A; ÷ S",
        _sequence(trust_region={"kind": "log_clip"}),
    ),
    "fspo": Preset(
        "arXiv 2509.09177",
        "exp(clip(Σ_t δ, ±0.03 √T_i)) A; ÷ S",
        _sequence(ratio={"kind": "sequence", "length_normalized": False}, trust_region={"kind": "length_clip"}),
    ),
    "holder_po": Preset(
        "arXiv 2605.12058",
        "min(M A, clip(M, 1 − 3e-4, 1 + 4e-4) A), M = (mean_t r^p)^(1/p), p = 1; ÷ S",
        _sequence(ratio={"kind": "power_mean", "p": 1.0}),
    ),
    "sapo": Preset(
        "arXiv 2511.20347; TRL, verl",
        "4/τ σ(τ (r − 1)) A, τ = 1 if A > 0, else 1.05; ÷ T_i, S",
        _token(trust_region={"kind": "soft_gate"}, aggregation=_BY_SEQUENCE),
    ),
    "dppo_tv": Preset(
        "arXiv 2602.04879; verl",
        "sg[min(r, 20)] A log π 1[p − p_old ≤ 0.2 if A > 0, ≥ −0.2 else]; ÷ Σ T",
        _token(trust_region={"kind": "divergence", "measure": "tv", "threshold": 0.2}),
    ),
    "dppo_kl": Preset(
        "arXiv 2602.04879; verl",
        "sg[min(r, 20)] A log π 1[binary KL ≤ 0.05, or p moved against A]; ÷ Σ T",
        _token(trust_region={"kind": "divergence", "measure": "kl", "threshold": 0.05}),
    ),
    "two_sided_clip": Preset(
        "arXiv 1912.09729, 2505.07291; verl's dual clip",
        "grpo, at least 3 A where A < 0; ÷ T_i, S",
        _token(trust_region={"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}, aggregation=_BY_SEQUENCE),
    ),
    "cispo": Preset("arXiv 2506.13585", "sg[min(r, 5)] A log π; ÷ Σ T", _token(trust_region={"kind": "clip_weight"})),
    "dr_grpo": Preset(
        "arXiv 2503.20783",
        "grpo with A = R − mean; ÷ 1024 S",
        _token(advantage={"kind": "no_std"}, aggregation={"kind": "constant"}),
    ),
    "rloo": Preset(
        "arXiv 2402.14740; verl",
        "min(r A, clip(r, 0.8, 1.2) A), A = R − mean of the others; ÷ Σ T",
        _token(advantage={"kind": "leave_one_out"}),
    ),
    "max_rl": Preset(
        "arXiv 2602.02710",
        "min(r A, clip(r, 0.8, 1.2) A), A = (R − mean) / mean; ÷ Σ T",
        _token(advantage={"kind": "divide_by_mean"}),
    ),
    "reinforce_plus_plus_baseline": Preset(
        "arXiv 2501.03262",
        "min(r A, clip(r, 0.8, 1.2) A), A = (R − mean) / std of the batch; ÷ Σ T",
        _token(advantage={"kind": "whitened"}),
    ),
    "gdpo": Preset(
        "arXiv 2601.05242; TRL",
        "min(r A, clip(r, 0.8, 1.2) A), A = Σ_k w_k (R_k − mean) / std_k, / std of the batch; ÷ Σ T",
        _token(advantage={"kind": "gdpo"}),
    ),
    "opsm": Preset(
        "arXiv 2512.02556; slime, TRL",
        "grpo, without gradient where A < 0 and mean_t (log π_old − log π) > 1e-4; ÷ T_i, S",
        _token(aggregation=_BY_SEQUENCE, opsm={}),
    ),
    "m2po": Preset(
        "arXiv 2510.01161; AReaL",
        "min(r A, clip(r, 0.8, 1.2) A), without gradient at the largest (log π_old/π_sampler)², until their mean ≤ 0.04; ÷ Σ T",
        _token(m2po={}),
    ),
    "decoupled_ppo": Preset(
        "arXiv 2110.00641, 2505.24298; AReaL",
        "w 1[w ≤ 5] min(r A, clip(r, 0.8, 1.2) A), w = π_old / π_sampler; ÷ Σ T",
        _token(mismatch={"kind": "mask", "low": 0.0, "high": 5.0}),
    ),
    "clip_cov": Preset(
        "arXiv 2505.22617",
        "grpo, without gradient at a few tokens with 1 ≤ c ≤ 5; ÷ Σ T",
        _token(trust_region={"kind": "clip_cov", "low": 0.2, "high": 0.2}),
    ),
    "kl_cov": Preset(
        "arXiv 2505.22617",
        "r A − |δ| 1[c is among the highest]; ÷ Σ T",
        _token(trust_region={"kind": "none"}, kl_cov={}),
    ),
}

CORRECTIONS: Mapping[str, Preset] = {
    "tis_token": Preset("fengyao.notion.site; verl, NeMo-RL", "min(w, 2), w of the token", {"mismatch": {"kind": "truncate"}}),
    "tis_sequence": Preset("verl", "min(Π_t w, 2)", {"mismatch": {"kind": "truncate", "level": "sequence"}}),
    "mis_token": Preset("verl, slime", "w 1[w ≤ 2]", {"mismatch": {"kind": "mask", "low": 0.0, "high": 2.0}}),
    "mis_sequence": Preset(
        "verl, slime", "Π_t w 1[Π_t w ≤ 2]", {"mismatch": {"kind": "mask", "level": "sequence", "low": 0.0, "high": 2.0}}
    ),
    "icepop": Preset("arXiv 2510.18855", "w 1[0.5 ≤ w ≤ 5]", {"mismatch": {"kind": "mask", "low": 0.5, "high": 5.0}}),
    "rejection_sequence": Preset("verl", "1[0.5 ≤ Π_t w ≤ 2]", {"rejection": {"level": "sequence", "low": 0.5, "high": 2.0}}),
    "rejection_geometric": Preset(
        "verl", "1[0.999 ≤ (Π_t w)^(1/T_i) ≤ 1.001]", {"rejection": {"level": "geometric", "low": 0.999, "high": 1.001}}
    ),
}
"""Weights w = π_old / π_sampler, by peers' names. Each goes with any preset, a rejection with weights."""

_SUFFIXES = (".yaml", ".yml")


def find_preset(name: Any) -> Preset:
    """A file has the keys of ``objective``, and ``formula`` and ``source`` as text. Raises ValueError.

    Its ``preset`` is the one below (``tepo``); ``plugins`` are relative to the file.
    """
    if isinstance(name, str) and is_preset_file(name):
        return _read_preset(name)
    if not isinstance(name, str) or name not in PRESETS:
        text = str(name)  # one whose letters are in another order is nearer
        nearest = max(PRESETS, key=lambda known: (SequenceMatcher(None, text, known).ratio(), sorted(text) == sorted(known)))
        raise ValueError(
            f"objective.preset = {text[:60]!r} is unknown; the nearest is {nearest!r}. Known: {', '.join(PRESETS)}, or a "
            "file of your own, my_preset.yaml"
        )
    return PRESETS[name]


def is_preset_file(name: str) -> bool:
    return name.endswith(_SUFFIXES)


def _read_preset(name: str) -> Preset:
    path, where = Path(name).expanduser().absolute(), f"objective.preset = {name}"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE).decode()
        raw = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{where}: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, Mapping) or not all(isinstance(key, str) for key in raw):
        raise ValueError(f"{where}: a preset's file has the keys of an objective section, such as 'trust_region:'")
    if isinstance(raw.get("objective"), Mapping):
        raise ValueError(f"{where}: the keys of an objective section are at its top, without 'objective:'; is it a run's file?")
    sections = dict(raw)
    texts = {key: sections.pop(key, "") for key in ("source", "formula")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {key} is a text")
    base = sections.pop("preset", "tepo")
    if not isinstance(base, str) or base not in PRESETS:
        raise ValueError(f"{where}: its own preset = {str(base)[:60]!r} must be one of {', '.join(PRESETS)}")
    plugins = beside(path, sections.pop("plugins", ()))
    return Preset(**texts, changes=sections, base=base, plugins=plugins if isinstance(plugins, tuple) else (plugins,))


def beside(file: Path, path: Any) -> Any:
    """Makes a preset's or plugin's path, or a list of them, relative to the file; ``~`` and ``${`` stay."""
    if isinstance(path, list | tuple):
        return tuple(beside(file, item) for item in path)
    is_path = isinstance(path, str) and path.endswith((*_SUFFIXES, ".py")) and not path.startswith(("~", "${"))
    return str(file.absolute().parent / path) if is_path else path
