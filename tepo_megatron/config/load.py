from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import load_plugin
from tepo_megatron.config.objective.presets import LARGEST_FILE, beside, is_preset_file, read_preset
from tepo_megatron.config.run import RunConfig
from tepo_megatron.config.schema import describe, schema_rows, show, with_plugins

_MOST_BASES = 32
_OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


class ConfigError(ValueError):
    """``problems`` has one line per error."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count} in the configuration", *(f"  {line}" for line in self.problems)]))


def load_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's YAML (``None``: only defaults), applies overrides, and checks the whole.

    ``base: other.yaml`` in a file names the file below it, relative to it. Overrides are ``a.b=value`` in YAML; the last one of
    a path counts. ``${a.b}`` takes the value of another field, also a default.

    Raises:
        ConfigError: lists all problems found at once.
    """
    source = "overrides" if path is None else str(path)
    problems: list[str] = []
    values: Any = None
    try:
        raw = OmegaConf.create() if path is None else _read(Path(path))
        over = _parse_overrides(overrides, problems)
        values = _resolve(_merge(raw, over))
        config = RunConfig.model_validate(values)
    except RecursionError as error:
        raise ConfigError(source, [*problems, "sections, lists or ${…} are nested too deeply"]) from error
    except (OmegaConfBaseException, ValidationError) as error:
        with with_plugins(_named_plugins(values)):
            raise ConfigError(source, [*problems, *describe(error)]) from error
    with with_plugins(config.objective.plugins):
        problems += _wrong_permissions(config.train.allow_change)
    if problems:
        raise ConfigError(source, problems)
    return config


def _named_plugins(values: Any) -> tuple[str, ...]:
    """Plugins of a run's values and its preset file; empty if one cannot be loaded, since validation reports why."""
    raw = values.get("objective") if isinstance(values, Mapping) else None
    if not isinstance(raw, Mapping):
        return ()
    preset, plugins = raw.get("preset"), raw.get("plugins")
    try:
        inherited = read_preset(preset).plugins if isinstance(preset, str) and is_preset_file(preset) else ()
        listed = plugins if isinstance(plugins, list | tuple) else ()
        return tuple(dict.fromkeys(load_plugin(str(item)).name for item in (*inherited, *listed)))
    except ValueError:
        return ()


def _wrong_permissions(entries: Sequence[str]) -> list[str]:
    paths = [row.path for row in schema_rows()]
    known = {path[:end] for path in paths for end in (*(index for index, sign in enumerate(path) if sign == "."), len(path))}
    result = []
    for entry in entries:
        if entry == "model.dtype":
            result.append("train.allow_change: model.dtype is of the model's architecture, which a resumed run cannot change")
        elif entry not in known:
            near = difflib.get_close_matches(entry, sorted(known), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            result.append(f"train.allow_change: {show(entry)} is no field of a run{hint}")
    return result


def dump_resolved(config: Section) -> str:
    """YAML of every field; ``load_run`` reads it back equal."""
    return _to_yaml(config.model_dump(mode="json"))


def dump_diff(config: RunConfig) -> str:
    """YAML of what differs from the defaults; ``load_run`` reads it back equal."""
    differing = _diff(config, RunConfig())
    return _to_yaml(differing) if differing else ""


def _read(path: Path, above: tuple[Path, ...] = ()) -> DictConfig:
    """``above``: the files that named this one."""
    if path.resolve() in above:
        raise ConfigError(str(above[0]), [f"base: {path} is its own base; remove one of the two"])
    if len(above) == _MOST_BASES:
        raise ConfigError(str(above[0]), [f"base: more than {_MOST_BASES} files, each the base of the one before"])
    try:
        content = _parse(_read_text(path))
    except yaml.YAMLError as error:
        mark = (error.problem_mark or error.context_mark) if isinstance(error, yaml.MarkedYAMLError) else None
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(str(path), [f"{path}{place}: {describe(error)[0]}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"{path}: not UTF-8 text (byte {error.start})"]) from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(path), describe(error)) from error
    except OSError as error:
        raise ConfigError(str(path), [f"{path}: cannot be read: {error.strerror or error}"]) from error
    if not isinstance(content, DictConfig):
        raise ConfigError(str(path), [f"{path}: the top level is a list; it must be sections such as 'train:'"])
    _make_plugin_paths_absolute(content, path)
    base = _plain(content).get("base")
    if base is None:
        return content
    if not isinstance(base, str) or "\0" in base or "${" in base:
        raise ConfigError(str(path), [f"base: got {show(base)}; allowed: the path of one YAML file"])
    del content["base"]
    return _merge(_read(path.parent / base, (*above, path.resolve())), content)


def _make_plugin_paths_absolute(content: DictConfig, path: Path) -> None:
    objective = _plain(content).get("objective")
    if not isinstance(objective, Mapping):
        return
    for name in {"preset", "plugins"} & set(objective):
        content["objective"][name] = beside(path, objective[name])


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ConfigError(str(path), [f"{path}: larger than {LARGEST_FILE} bytes; this is no run's configuration"])
    return data.decode("utf-8")


def _parse(text: str) -> DictConfig | ListConfig:
    try:
        parsed = OmegaConf.load(StringIO(text))
    except OmegaConfBaseException:
        raise
    except (ValueError, AttributeError) as error:  # text like a number or a time, such as 0x_
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    except RecursionError as error:
        raise yaml.YAMLError("sections or lists are nested too deeply") from error
    _check_texts(OmegaConf.to_container(parsed))
    return parsed


def _check_texts(value: Any) -> None:
    """Refuses ``${…}`` with a resolver, such as ``${oc.env:HOME}``, and ``???``."""
    if isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_texts(inner)
    elif value == "???":
        raise MissingMandatoryValue("??? stands for a value that is missing; give one, or leave the key out")
    elif isinstance(value, str):
        for opening in _OPENING.finditer(value):
            inside = value[opening.end() :].partition("}")[0]
            if ":" in inside or "${" in inside:
                raise InterpolationResolutionError(
                    f"${{{inside[:40]}}}: only fields of this configuration can be referred to, since environments differ "
                    "between nodes, and may hold what no log should; give the value on the command line, such as "
                    'output="$HOME/run"'
                )


def _parse_overrides(overrides: Iterable[str], problems: list[str]) -> DictConfig:
    parsed = OmegaConf.create()
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not re.fullmatch(r"[^\s.=-][^\s.=]*(\.[^\s.=]+)*", key):
            problems.append(f"override {show(override)}: write path=value, such as train.steps=10")
            continue
        try:
            added = OmegaConf.from_dotlist([override])
            _check_texts(OmegaConf.to_container(added))
            parsed = _merge(parsed, added)
        except RecursionError:
            problems.append(f"override {show(override)}: its value is nested too deeply")
        except OmegaConfBaseException as error:
            problems.append(f"override {show(override)}: {describe(error)[0]}")
        except yaml.YAMLError as error:
            problems.append(f"override {show(override)}: its value is {describe(error)[0]}")
        except (ValueError, AttributeError) as error:  # PyYAML raises the latter for a !!timestamp that is none
            problems.append(f"override {show(override)}: its value cannot be read: {error}")
    return parsed


def _merge(below: DictConfig, above: DictConfig) -> DictConfig:
    """A section of another kind replaces the one below."""
    below = below.copy()
    _drop_other_kinds(below, above)
    merged = OmegaConf.merge(below, above)
    assert isinstance(merged, DictConfig)
    return merged


def _drop_other_kinds(below: DictConfig, above: DictConfig) -> None:
    for key, old in list(below.items_ex(resolve=False)):
        new = above._get_node(key)
        if not isinstance(old, DictConfig) or not isinstance(new, DictConfig):
            if isinstance(old, Container) and isinstance(new, Container):  # a list over a section, which do not merge
                del below[key]
            continue
        kinds = [node._value() for node in (old._get_node("kind"), new._get_node("kind")) if isinstance(node, Node)]
        if len(kinds) == 2 and kinds[0] != kinds[1]:
            below[key] = {}
        else:
            _drop_other_kinds(old, new)


def _resolve(raw: DictConfig) -> Any:
    defaults = OmegaConf.create(RunConfig().model_dump(mode="json"))
    merged = _merge(defaults, raw)
    complete = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    return _select(complete, OmegaConf.to_container(raw))


def _plain(section: DictConfig) -> dict[str, Any]:
    """``${…}`` stays unresolved."""
    values = OmegaConf.to_container(section)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _select(values: Any, shape: Any) -> Any:
    """A default must not look as if the user had set it."""
    if isinstance(shape, Mapping) and isinstance(values, Mapping):
        return {key: _select(values[key], inner) for key, inner in shape.items()}
    return values


def _diff(section: Section, default: Section) -> dict[str, Any]:
    """A section with a preset is compared with the preset."""
    preset = getattr(section, "preset", None)
    reference = default if preset is None else type(section).model_validate({"preset": preset})
    result = {} if preset == getattr(default, "preset", None) else {"preset": preset}
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(reference, name)
        if value != usual and isinstance(value, Section) and type(value) is type(usual):
            result[name] = _diff(value, usual)
        elif value != usual:
            result[name] = section.model_dump(mode="json")[name]
    return result


def _to_yaml(values: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(_escape(values)))


def _escape(value: Any) -> Any:
    r"""``${`` becomes ``\${``, so that it is not read back as a reference."""
    if isinstance(value, Mapping):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
