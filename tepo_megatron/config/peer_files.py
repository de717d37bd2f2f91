"""Reads files of other trainers, and names the data files in them."""

import json
import re
from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tepo_megatron.runtime.text import flat

_show = partial(json.dumps, ensure_ascii=False, default=str)


def read_peer_file(name: str, file: Path, children: tuple[Path, ...] = ()) -> str:
    """Returns YAML. NeMo-RL's ``defaults`` name files beside it, which come below it. Raises ValueError."""
    if file.resolve() in children:
        raise ValueError(f"{file} is its own parent by defaults; correct the file")
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raw = _parsed(text)
    if name != "nemo-rl" or not isinstance(raw, DictConfig):
        return text
    named = raw.get("defaults")
    listed = [named] if isinstance(named, str) else list(named) if isinstance(named, ListConfig) else []
    parents = [file.parent / item for item in listed if isinstance(item, str) and (file.parent / item).is_file()]
    if not parents or len(parents) < len(listed):
        return text
    del raw["defaults"]
    below = [_parsed(read_peer_file(name, parent, (*children, file.resolve()))) for parent in parents]
    if wrong := [parent for parent, content in zip(parents, below, strict=True) if not isinstance(content, DictConfig)]:
        raise ValueError(f"{wrong[0]} has no settings, and {file} names it in defaults; correct one of the two")
    try:
        return OmegaConf.to_yaml(reduce(_over, [OmegaConf.create({}), *below, raw]))
    except (TypeError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} and the files of its defaults do not fit together ({reason}); correct one of them") from error


def _over(below: Any, above: Any) -> Any:
    """A section of ``above`` with ``_override_`` replaces the one below; others are merged."""
    sections: Any = OmegaConf.to_container(above)
    for name, section in sections.items():
        if isinstance(section, dict) and section.pop("_override_", False):
            below.pop(name, None)
    return OmegaConf.merge(below, sections)


def _parsed(text: str) -> DictConfig | ListConfig:
    try:
        return OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error


def resolved(text: str, left: list[str]) -> dict[str, Any]:
    """References to other keys are followed; what another resolver computes is left out."""
    whole, result = _parsed(text), dict[str, Any]()
    raw = OmegaConf.to_container(whole)
    if not isinstance(raw, Mapping):
        raise ValueError("the file has no settings; give the YAML that the other trainer reads")
    for key, value in flat(raw).items():
        if isinstance(value, str) and "${" in value:
            try:
                if ":" in value.replace("${oc.select:", ""):  # which names a key, as ${data.seed} does
                    raise ValueError("it is computed; write the number")
                value = OmegaConf.select(whole, key, throw_on_resolution_failure=True)
            except (OmegaConfBaseException, ValueError) as error:
                left.append(f"{key} = {_show(value)}: {' '.join(str(error).split())}")
                continue
        result[key] = value
    return result


def sources(files: list[Any]) -> list[Any]:
    """Names files of one name after the nearest folders that differ."""
    parts = [(*path.parts[:-1], path.stem) for path in map(PurePath, map(str, files))]
    for depth in range(1, min(map(len, parts), default=0) + 1):
        for raw in ([part[-depth] for part in parts], ["-".join(part[-depth:]) for part in parts]):
            names = [re.sub(r"^[^A-Za-z_]+|[^\w.-]", "", name)[:60] for name in raw]
            if all(names) and len(set(names)) == len(names):
                return files if depth == 1 else [{"name": name, "path": file} for name, file in zip(names, files, strict=True)]
    return files
