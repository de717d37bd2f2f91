import difflib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial, reduce
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from tepo_megatron.config.base import Section, merge_sections
from tepo_megatron.config.objective.custom import Plugin
from tepo_megatron.config.objective.presets import LARGEST_FILE, Preset, beside
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.paths import FilePaths, absolute
from tepo_megatron.config.run import RunConfig
from tepo_megatron.config.schema import describe, longest_path, schema_rows, show, with_plugins

_MOST_BASES = 32
_OPENING = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


class ConfigError(ValueError):
    """``problems`` has one line per error."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count} in the configuration", *(f"  {line}" for line in self.problems)]))


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Fills the list at its end."""
    sentences: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield sentences
    sentences += dict.fromkeys(str(warning.message) for warning in caught)


def load_run(path: str | Path | None, overrides: Sequence[str] = (), *, trains: bool = True) -> RunConfig:
    """Reads a run's YAML (``None``: only defaults), applies overrides, and checks the whole.

    ``base: other.yaml`` in a file names the file below it. Paths in a file are relative to it, those of overrides to the
    current folder; with ``cluster.ssh`` all stay as written. Overrides are ``a.b=value`` in YAML; the last one of a field
    counts. ``${a.b}`` takes the value of another field, also a default. ``trains`` false: without the checks of training.

    Raises:
        ConfigError: lists all problems found at once.
    """
    if path is None:
        return _load("overrides", [], overrides, trains)
    return _load(str(path), _read(Path(path)), overrides, trains)


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """As ``load_run``, over a run that is there."""
    content = escape_references(_diff(config, RunConfig()))
    if "train" in config.data.model_fields_set:  # said aloud, which require_data wants to know
        content.setdefault("data", {}).setdefault("train", config.data.model_dump(mode="json")["train"])
    return _load("settings", [(Path("run.yaml"), content)], overrides, trains=True)


_Files = list[tuple[Path, dict[str, Any]]]  # with their content, bases first


def _load(source: str, files: _Files, overrides: Sequence[str], trains: bool) -> RunConfig:
    problems: list[str] = []
    values: Any = None
    paths = FilePaths()
    try:
        layers = [*(content for _, content in files), _parse_overrides(overrides, problems)]
        *contents, settings = layers = _with_kinds(layers, problems)
        chosen = reduce(merge_sections, layers)
        cluster = chosen.get("cluster")
        if not (isinstance(cluster, Mapping) and cluster.get("ssh")):
            of_files = (paths.of_file(content, file) for (file, _), content in zip(files, contents, strict=True))
            chosen = reduce(merge_sections, [*of_files, settings])
        defaults = RunConfig().model_dump(mode="json")
        if isinstance(chosen.get("objective"), Mapping) and "preset" in chosen["objective"]:
            with suppress(ValueError), warnings.catch_warnings(action="ignore"):  # validation says why
                defaults["objective"] = escape_references(load_objective(chosen["objective"]["preset"]).model_dump(mode="json"))
        merged = OmegaConf.create(merge_sections(defaults, chosen))
        values = _select(OmegaConf.to_container(merged, resolve=True, throw_on_missing=True), chosen)
        config = RunConfig.model_validate(values, context={"trains": trains})
    except RecursionError as error:
        raise ConfigError(source, [*problems, "sections, lists or ${…} are nested too deeply"]) from error
    except (OmegaConfBaseException, ValidationError) as error:
        with with_plugins(_named_plugins(values)):
            raise ConfigError(source, [*problems, *describe(error)]) from error
    if config.train.allow_change:
        with with_plugins(config.objective.plugins):
            problems += _wrong_permissions(config.train.allow_change)
    problems += paths.misplaced(config, files[-1][0]) if files else []
    if problems:
        raise ConfigError(source, problems)
    if trains and config.data.heldout is not None and _evaluates_nothing(layers):
        warnings.warn(
            "data.heldout is given over a run that had none and has evaluate.every = 0: nothing is evaluated. Set "
            "evaluate.every as well, to 0 to say that you mean it",
            stacklevel=3,
        )
    return config


def _evaluates_nothing(layers: Sequence[Mapping[str, Any]]) -> bool:
    """As `dump_resolved` writes it for a run without held-out problems."""
    for layer in reversed(layers):
        data, evaluate = (layer.get(name) for name in ("data", "evaluate"))
        if isinstance(evaluate, Mapping) and "every" in evaluate:
            return evaluate["every"] == 0 and isinstance(data, Mapping) and data.get("heldout", "") is None
    return False


def _with_kinds(layers: Sequence[dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Names kinds that presets imply: a section of another kind above then drops its fields."""
    preset, below, result = "tepo", dict[str, str](), list(layers)
    chosen: dict[str, str] = {}  # section → its kind
    changed: dict[str, str] = {}  # section → a field for the kind of a preset
    with_objective = [index for index, layer in enumerate(layers) if isinstance(layer.get("objective"), Mapping)]
    for index in with_objective if len(with_objective) > 1 else ():
        objective = dict(layers[index]["objective"])
        preset, sections = objective.get("preset", preset), {}
        with suppress(ValueError), warnings.catch_warnings(action="ignore"):  # validation says why
            sections = load_objective(preset).sections
        kinds = {name: section.kind for name, section in sections.items() if hasattr(section, "kind")} | chosen
        for key, name in changed.items():
            if sections and key not in objective and kinds.get(key) != below[key]:
                problems.append(
                    f"objective.{key}.{name} was given for the kind {below[key]}, and objective.preset = {preset} has "
                    f"{kinds.get(key, 'none')}; give objective.{key} beside the preset, or leave {name} out"
                )
        below = kinds
        for key, section in objective.items():
            if isinstance(section, Mapping) and "kind" in section:
                chosen[key] = section["kind"]
                changed.pop(key, None)
            elif isinstance(section, Mapping) and section and key in kinds:
                objective[key] = {"kind": kinds[key], **section}
                changed[key] = next(iter(section))
        result[index] = {**layers[index], "objective": objective}
    return result


def load_objective(preset: str) -> ObjectiveConfig:
    """``preset`` is a name or a file. Raises ConfigError with all problems, and ValueError if there is no such preset."""
    Preset.find(preset)
    try:
        return ObjectiveConfig(preset=preset)
    except ValidationError as error:
        with with_plugins(_named_plugins({"objective": {"preset": preset}})):
            raise ConfigError(preset, describe(error, above=("objective",))) from error


def _named_plugins(values: Any) -> tuple[str, ...]:
    """Plugins of a run and its preset file; empty if one cannot be loaded (validation says why)."""
    raw = values.get("objective") if isinstance(values, Mapping) else None
    if not isinstance(raw, Mapping):
        return ()
    listed = raw.get("plugins")
    try:
        plugins = (*Preset.find(raw.get("preset", "tepo")).plugins, *(listed if isinstance(listed, list | tuple) else ()))
        return tuple(dict.fromkeys(Plugin.load(str(item)).name for item in plugins))
    except ValueError:
        return ()


def _wrong_permissions(entries: Sequence[str]) -> list[str]:
    result = []
    for entry in entries:
        if entry == "model.dtype":
            result.append("train.allow_change: model.dtype is of the model's architecture, which a resumed run cannot change")
        elif longest_path(entry) != entry:
            fields = [row.path for row in schema_rows()]
            paths = {*fields, *(field.rpartition(".")[0] for field in fields)}
            near = difflib.get_close_matches(entry, sorted(paths), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            result.append(f"train.allow_change: {show(entry)} is no field of a run{hint}")
    return result


def dump_resolved(config: Section, *, with_resume: bool = True) -> str:
    """YAML of every field, with absolute paths: ``load_run`` reads the same run from anywhere. In a run's own folder
    ``train.resume`` is as by default, since ``--resume`` continues the run.
    """
    document = absolute(config).model_dump()
    if not with_resume:
        document["train"] |= {"resume": False, "resume_from": None}
    return _to_yaml(document)


def dump_diff(config: RunConfig) -> str:
    """Of what differs from the defaults, with paths as they are: for a file in the current folder."""
    differing = _diff(config, RunConfig())
    return _to_yaml(differing) if differing else ""


def _read(path: Path, above: tuple[Path, ...] = ()) -> _Files:
    """``above``: the files that named this one. ``${…}`` stays unresolved."""
    if path.resolve() in above:
        raise ConfigError(str(above[0]), [f"base: {path} is its own base; remove one of the two"])
    if len(above) == _MOST_BASES:
        raise ConfigError(str(above[0]), [f"base: more than {_MOST_BASES} files, each the base of the one before"])
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigError(str(path), [f"{path}: larger than {LARGEST_FILE} bytes; this is no run's configuration"])
        text = data.decode("utf-8")
        content = _parse(lambda: OmegaConf.load(StringIO(text)))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        mark = (error.problem_mark or error.context_mark) if isinstance(error, yaml.MarkedYAMLError) else None
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(str(path), [f"{path}{place}: {describe(error)[0]}"]) from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), [f"{path}: the top level is a list; it must be sections such as 'train:'"])
    _move_plugins(content, path)
    base = content.pop("base", None)
    if base is None:
        return [(path, content)]
    if not isinstance(base, str) or "\0" in base or "${" in base:
        raise ConfigError(str(path), [f"base: got {show(base)}; allowed: the path of one YAML file"])
    return [*_read(path.parent / base, (*above, path.resolve())), (path, content)]


def _move_plugins(content: dict[str, Any], file: Path) -> None:
    """Makes paths of presets and plugins relative to the file that ``content`` is from."""
    objective = content.get("objective")
    if isinstance(objective, dict):
        objective |= {name: beside(file, objective[name]) for name in ("preset", "plugins") if name in objective}


def _parse(parser: Callable[[], DictConfig | ListConfig]) -> Any:
    """Raises OmegaConfBaseException or YAMLError."""
    try:
        parsed = OmegaConf.to_container(parser())
        _check_texts(parsed)
    except OmegaConfBaseException:
        raise
    except (ValueError, AttributeError, IndexError) as error:  # text like a number or a time, such as 0x_ or !!timestamp 1
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    except RecursionError as error:
        raise yaml.YAMLError("sections or lists are nested too deeply") from error
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


def _parse_overrides(overrides: Iterable[str], problems: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not re.fullmatch(r"[^\s.=-][^\s.=]*(\.[^\s.=]+)*", key):
            problems.append(f"override {show(override)}: write path=value, such as train.steps=10")
            continue
        try:
            parsed = merge_sections(parsed, _parse(partial(OmegaConf.from_dotlist, [override])))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            problems.append(f"override {show(override)}: {describe(error)[0]}")
    return parsed


def setting_of_file(setting: str, file: Path) -> str:
    """An override ``a.b=value`` that stands in a file: its path becomes that of a command line."""
    problems: list[str] = []
    content = _parse_overrides([setting], problems)
    changed: Any = deepcopy(content)
    _move_plugins(changed, file)
    changed = FilePaths().of_file(changed, file)
    if problems or changed == content:
        return setting
    key = setting.partition("=")[0]
    for name in key.split("."):
        changed = changed[name]
    return f"{key}={as_yaml(changed)}"


def as_yaml(value: object) -> str:
    """For an override, or a line of a file; printable ASCII."""

    def as_json(value: object) -> Any:
        if isinstance(value, Section):
            return value.model_dump(mode="json")
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, Mapping):
            return dict(value)
        raise ValueError(f"a setting cannot be {type(value).__name__} ({value!r}); give numbers, text, lists and mappings")

    text = json.dumps(value, ensure_ascii=False, default=as_json)
    return "".join(letter if " " <= letter <= "~" else f"\\U{ord(letter):08x}" for letter in text)


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
    return OmegaConf.to_yaml(OmegaConf.create(escape_references(values)))


def escape_references(value: Any) -> Any:
    r"""``${`` becomes ``\${``, which is not read as a reference."""
    if isinstance(value, Mapping):
        return {key: escape_references(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escape_references(inner) for inner in value]
    if isinstance(value, str | Path):
        value = str(value)
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
