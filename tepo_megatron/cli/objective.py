"""``tepo objective``. Presets and plugins are listed without torch."""

import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import ValidationError
from typer import Argument, Option

from tepo_megatron.cli.console import AsJson, new_table, print_json, show
from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.custom import CustomKind, CustomSlot, Plugin
from tepo_megatron.config.objective.presets import CORRECTIONS, PRESETS, Preset
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.runtime.text import echo

app = typer.Typer()

_CHOICES = ("advantage", "ratio", "trust_region", "aggregation")


@app.command("list")
def _list_presets(
    files: Annotated[
        list[str] | None, Argument(metavar="[FILE]...", help="Your own beside them: my_preset.yaml, my_objective.py.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print each preset with its formula, source, and choices.

    r is the token's ratio π_θ/π_old, s_i the sequence's, δ = log r, A the advantage, T the response tokens, S the sequences.

    [dim]tepo objective list my_preset.yaml my_objective.py[/]
    """
    result = {name: _find_preset(name) for name in files or ()}
    presets = {**PRESETS, **{name: preset for name, preset in result.items() if preset is not None}}
    plugins = [_find_plugin(name) for name, preset in result.items() if preset is None]
    configs = {name: _load_objective(name) for name in presets}
    if as_json:
        listed = {
            name: {**_texts_of(item), "objective": configs[name].model_dump(mode="json")} for name, item in presets.items()
        }
        corrections = {name: {**_texts_of(item), "fields": item.changes} for name, item in CORRECTIONS.items()}
        kinds = {"plugins": {plugin.name: _kind_records(plugin) for plugin in plugins}} if plugins else {}
        print_json({"presets": listed, "corrections": corrections, **kinds})
        return
    table = new_table("preset", "what is maximised; ÷ its denominator", "source", "composed of", keep="preset")
    for name, preset in presets.items():
        config = configs[name].model_dump(exclude_none=True)
        beside = [f"{key}: {_say(section)}" for key, section in config.items() if key not in (*_CHOICES, "preset", "plugins")]
        choices = " · ".join(_say(config[choice]) for choice in _CHOICES)
        table.add_row(f"[bold]{name}[/]", _plain(preset.formula), _plain(preset.source), "\n".join([choices, *beside]))
    show(table)
    weighted = "times the surrogate, w = π_old / π_sampler"
    table = new_table("for a sampler that differs", weighted, "source", "fields", keep="source")
    for name, correction in CORRECTIONS.items():
        fields = "\n".join(f"{key}: {_say(section)}" for key, section in correction.changes.items())
        table.add_row(f"[bold]{name}[/]", _plain(correction.formula), _plain(correction.source), fields)
    show(table)
    for plugin in plugins:
        _show_plugin(plugin)


@app.command("show")
def _show_preset(
    name: Annotated[str, Argument(metavar="NAME", help="A preset, a preset's file, or a plugin.")],
    png: Annotated[Path | None, Option(help="Also draw the gradient weight into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print every field of a preset with its value and meaning, and how strongly it pushes a token at which ratio.

    The curves are gradients of the objective itself, for a response of one token with a probability of 0.1 under π_old. For a
    plugin (my_objective.py), prints its kinds with their fields.

    [dim]tepo objective show my_preset.yaml --png mine.png[/]
    """
    preset = _find_preset(name)
    if preset is None:
        plugin = _find_plugin(name)
        if png is not None:
            raise ValueError(f"--png draws a preset, and {name} is a plugin; write a preset's file with its kinds")
        if as_json:
            print_json(_kind_records(plugin))
        else:
            _show_plugin(plugin)
        return
    config = _load_objective(name)
    ratios, lines = _curves(config)
    if as_json:
        fields = [{"field": path, "value": value, "meaning": meaning} for path, value, meaning in _fields(config)]
        drawn = {line.label: list(line.ys) for line in lines}
        print_json({**_texts_of(preset), "fields": fields, "ratios": ratios, "gradient_weights": drawn})
    else:
        title = f"{_plain(name)}: {_plain(preset.formula)}\n{_plain(preset.source)}"
        table = new_table("field", "value", "meaning", keep="field", title=title)
        for path, value, meaning in _fields(config):
            table.add_row(path, _plain(value), _plain(meaning))
        show(table)
        show(_text_plot(ratios, lines), highlight=False, markup=False)
    if png is not None:
        _draw(ratios, lines, png, f"{name}: {preset.formula}")
        echo(f"wrote {png}", err=as_json)


@app.command("check")
def _check_command(
    targets: Annotated[
        list[str], Argument(metavar="TARGET...", help="my_objective.py, my_preset.yaml, or the name of a preset.")
    ],
    preset: Annotated[str, Option(help="What each kind of a plugin is checked over: a preset, or its file.")] = "grpo",
    reward_parts: Annotated[int, Option(min=1, help="Components that each reward has, for an advantage that reads them.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Check an objective against the rules for all objectives; exit code 1 if it breaks one.

    On random steps, in float64, without a model: micro-batches, ranks, the order of sequences and padding change nothing,
    gradients are finite, the same step gives the same, every field acts.

    [dim]tepo objective check my_objective.py[/]

    [dim]tepo objective check my_preset.yaml[/]
    """
    objectives = [pair for target in targets for pair in _objectives_of(target, preset)]
    notes = _notes_on(dict.fromkeys(plugin for _, config in objectives for plugin in config.plugins))
    from tepo_megatron.core.objective.checking import ObjectiveChecks

    checked: list[dict[str, Any]] = []
    for label, config in objectives:
        start = time.monotonic()
        findings = [finding._asdict() for finding in ObjectiveChecks(config, reward_parts=reward_parts).run()]
        checked.append({"objective": label, "rules": findings, "seconds": round(time.monotonic() - start, 3)})
    if as_json:
        print_json(checked)
    else:
        for item in checked:
            broken = [finding for finding in item["rules"] if finding["problem"]]
            echo(f"{item['objective']}: {len(item['rules'])} rules, {len(broken)} broken ({item['seconds']:.1f} s)")
            for finding in item["rules"]:
                echo(f"  {'BROKEN' if finding['problem'] else 'ok':6} {finding['rule']}")
                if finding["problem"]:
                    echo(f"         {finding['problem']}")
        for note in notes:
            echo(f"note: {note}")
    if any(finding["problem"] for item in checked for finding in item["rules"]):
        raise typer.Exit(1)


def _load_objective(preset: str) -> ObjectiveConfig:
    from tepo_megatron.config.load import load_objective

    return load_objective(preset)


def _texts_of(entry: Preset) -> dict[str, Any]:
    return {"formula": entry.formula, "source": entry.source}


def _show_plugin(plugin: Plugin) -> None:
    title = f"{_plain(plugin.name)}, digest {plugin.digest}"
    table = new_table("field", "default", "meaning", keep="field", title=title)
    for field, default, meaning in _kind_rows(plugin):
        table.add_row(f"[bold]{field}[/]" if " = " in field else field, _plain(default), _plain(meaning))
    show(table)


def _fields(section: Section, path: str = "objective") -> Iterator[tuple[str, str, str]]:
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}.{name}"
        if name == "kind":
            continue
        if not isinstance(value, Section):
            yield here, "off" if value is None else _number(value), field.description or ""
            continue
        yield here, str(getattr(value, "kind", "on")), type(value).__doc__ or ""
        yield from _fields(value, here)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.replace("``", "`").split()))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _say(section: Mapping[str, Any]) -> str:
    values = [f"{key} {_number(value)}" for key, value in section.items() if key != "kind"]
    kind = section.get("kind")
    if not values:
        return str(kind)
    return f"{kind} ({', '.join(values)})" if kind else ", ".join(values)


_XLABEL = "ratio to π_old"
_YLABEL = "gradient weight ∂J/∂log π"


class _Curve(NamedTuple):
    label: str
    mark: str
    colour: str
    ys: Sequence[float]


def _curves(config: ObjectiveConfig) -> tuple[list[float], list[_Curve]]:
    from tepo_megatron.core.objective.gradient_weight import gradient_weights

    weights = gradient_weights(config)
    result = [
        _Curve("A = 1", "+", "#2b6cb0", weights.positive_N.tolist()),
        _Curve("A = −1", "o", "#d9480f", weights.negative_N.tolist()),
    ]
    if (weights.falling_N - weights.positive_N).abs().max() > 0.01 * weights.positive_N.abs().max():  # visible in the plot
        result.append(_Curve("A = 1, the entropy falls", "*", "#9c6ade", weights.falling_N.tolist()))
    return weights.ratios_N.tolist(), result


def _text_plot(xs: Sequence[float], lines: Sequence[_Curve], *, width: int = 72, height: int = 17) -> str:
    values = [0.0, *(y for curve in lines for y in curve.ys)]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1.0, high + 1.0
    grid = [[" "] * width for _ in range(height)]

    def row(y: float) -> int:
        return round((high - y) / (high - low) * (height - 1))

    grid[row(0.0)] = ["·"] * width
    for curve in reversed(lines):
        for column in range(width):
            index = round(column / (width - 1) * (len(xs) - 1))
            grid[row(curve.ys[index])][column] = curve.mark
    labels = {row(y): f"{y:.3g}" for y in (high, 0.0, low)}
    drawn = [f"{labels.get(number, ''):>8} │{''.join(cells)}" for number, cells in enumerate(grid)]
    first, middle, last = (f"{x:.4g}" for x in (xs[0], xs[len(xs) // 2], xs[-1]))
    axis = f"{first}{middle:^{width - len(first) - len(last)}}{last}"
    legend = "   ".join(f"{curve.mark} {curve.label}" for curve in lines)
    return "\n".join(
        [f"{_YLABEL}, against the {_XLABEL}", *drawn, f"{'└':>10}{'─' * width}", f"{'':10}{axis}", f"{'':10}{legend}"]
    )


def _draw(xs: Sequence[float], lines: Sequence[_Curve], png: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(title, 95), loc="left", fontsize=11)
    axes.set_xlabel(_XLABEL)
    axes.set_ylabel(_YLABEL)
    axes.ticklabel_format(useOffset=False)
    axes.grid(True, color="#d9dfe5", linewidth=0.7)
    axes.axhline(0, color="#22303c", linewidth=0.8)
    for curve in reversed(lines):
        axes.plot(xs, curve.ys, color=curve.colour, label=curve.label)
    axes.legend(frameon=False)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, format="png")


_TRIED = (1.0, 0.1, 0.5, 2.0, 0.01, 10.0, 1)


def _find_preset(name: str) -> Preset | None:
    return Preset.find(name) if Preset.is_file(name) or name in PRESETS else None


def _find_plugin(name: str) -> Plugin:
    if not name.endswith(".py") and "." not in name:
        raise ValueError(
            f"{name} is no preset; there are {', '.join(PRESETS)}, or give a file: my_preset.yaml, my_objective.py"
        )
    return Plugin.load(name)


def _kind_rows(plugin: Plugin) -> Iterator[tuple[str, str, str]]:
    for kind in plugin.kinds:
        yield f"objective.{kind.slot}.kind = {kind.kind_name()}", "", kind.__doc__ or ""
        for name, field in kind.model_fields.items():
            if name != "kind":
                default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
                yield f"objective.{kind.slot}.{name}", default, field.description or ""


def _kind_records(plugin: Plugin) -> dict[str, Any]:
    fields = [{"field": field, "default": default, "meaning": meaning} for field, default, meaning in _kind_rows(plugin)]
    return {"digest": plugin.digest, "fields": fields}


def _objectives_of(target: str, preset: str) -> Iterator[tuple[str, ObjectiveConfig]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a range for another ratio is not an error of the kind
        if _find_preset(target) is not None:
            yield target, _load_objective(target)
            return
        plugin = _find_plugin(target)
        for kind in plugin.kinds:
            yield f"{target}: {kind.slot} {kind.kind_name()}, over {preset}", _alone(kind, plugin, preset)


def _notes_on(plugins: Iterable[str]) -> list[str]:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from tepo_megatron.config.objective.custom import Plugin; Plugin.load(sys.argv[1])"
    )
    result = []
    for plugin in plugins:
        done = subprocess.run([sys.executable, "-c", script, plugin], capture_output=True, text=True, check=False)
        if done.returncode:
            result.append(
                f"{plugin} cannot be read without torch, as a login node would for 'tepo plan' and 'tepo launch'; import torch "
                "within the methods that use it, and under typing.TYPE_CHECKING for annotations"
            )
    return result


def _alone(kind: type[CustomKind], plugin: Plugin, preset: str) -> ObjectiveConfig:
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    CustomSlot(kind.slot).kinds((plugin.name,))
    problems: Sequence[Any] = ()
    for value in _TRIED:
        section = {"kind": kind.kind_name(), **dict.fromkeys(required, value)}
        values = {"preset": preset, "plugins": (plugin.name,), kind.slot: section}
        try:
            return ObjectiveConfig.model_validate(values)
        except ValidationError as error:
            problems = error.errors()
            if not required:
                break
    faults = "; ".join(dict.fromkeys(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in problems))
    raise ValueError(
        f"{plugin.name}: the kind {kind.kind_name()!r} cannot be checked by itself over the preset {preset} ({faults}); write "
        "a preset's file that gives its fields values, and check that"
    )
