"""``tepo objective``: what there is to choose from (``list``, no torch), one objective in full (``show``), and whether one
keeps the rules (``check``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tepo_megatron.cli.console import console, print_json, show
from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.objective.custom import find_plugin, find_preset, kind_records, kind_rows, notes_on, objectives_of
from tepo_megatron.cli.options import AsJson
from tepo_megatron.config.base import Section
from tepo_megatron.config.objective.presets import CORRECTIONS, PRESETS, Preset
from tepo_megatron.config.objective.section import ObjectiveConfig

if TYPE_CHECKING:
    from rich.table import Table

    from tepo_megatron.config.objective.custom import Plugin

app = typer.Typer(no_args_is_help=True, help="Objectives: what there is to choose from.")

_CHOICES = ("advantage", "ratio", "trust_region", "aggregation")


@app.callback()
def _group() -> None:
    """Objectives: what there is to choose from."""


Files = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE]...", help="Your own beside them: my_preset.yaml, my_objective.py.")
]


@app.command("list")
def list_presets(files: Files = None, as_json: AsJson = False) -> None:
    """Print each preset with its formula, its source, and the choices that it is composed of.

    r is the token's ratio π_θ/π_old, s_i the sequence's, δ = log r, A the advantage, T the response tokens, S the sequences.

    [dim]tepo objective list[/]

    [dim]tepo objective list my_preset.yaml my_objective.py[/]
    """
    with user_errors():
        found = {name: find_preset(name) for name in files or ()}
        presets = {**PRESETS, **{name: preset for name, preset in found.items() if preset is not None}}
        plugins = [find_plugin(name) for name, preset in found.items() if preset is None]
        configs = {name: ObjectiveConfig(preset=name) for name in presets}
    if as_json:
        print_json(
            {
                "presets": {name: _record(each, configs[name]) for name, each in presets.items()},
                "corrections": {name: {**_said(each), "fields": each.changes} for name, each in CORRECTIONS.items()},
                **({"plugins": {plugin.name: kind_records(plugin) for plugin in plugins}} if plugins else {}),
            }
        )
        return
    show(preset_table(presets, configs))
    show(correction_table())
    for plugin in plugins:
        show(plugin_table(plugin))


@app.command("show")
def show_preset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A preset, a preset's file, or a plugin.")],
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the gradient weight into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print every field of a preset with its value and its meaning, and how strongly it pushes a token at which ratio.

    The curves are gradients of the objective itself, for a response of one token with a probability of 0.1 under π_old. Of a
    plugin (my_objective.py) the kinds with their fields are printed.

    [dim]tepo objective show dapo[/]

    [dim]tepo objective show my_preset.yaml --png mine.png[/]
    """
    with user_errors():
        preset = find_preset(name)
        if preset is None:
            plugin = find_plugin(name)
            if png is not None:
                raise ValueError(f"--png draws a preset, and {name} is a plugin; write a preset's file with its kinds")
            if as_json:
                print_json(kind_records(plugin))
            else:
                show(plugin_table(plugin))
            return
        config = ObjectiveConfig(preset=name)
    from tepo_megatron.cli.objective.plot import curves, draw, text_plot
    from tepo_megatron.core.objective.gradient_weight import gradient_weights, telling_log_ratios

    weights = gradient_weights(config, telling_log_ratios(config))
    ratios, lines = weights.ratios_N.tolist(), curves(weights)
    if as_json:
        fields = [{"field": path, "value": value, "meaning": meaning} for path, value, meaning in _fields(config)]
        drawn = {line.label: list(line.ys) for line in lines}
        print_json({**_said(preset), "fields": fields, "ratios": ratios, "gradient_weights": drawn})
    else:
        show(field_table(config, name, preset))
        console().print(text_plot(ratios, lines), highlight=False, markup=False)
    if png is not None:
        draw(ratios, lines, png, f"{name}: {preset.formula}")
        typer.echo(f"wrote {png}", err=as_json)


@app.command("check")
def check_command(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET...", help="my_objective.py, my_preset.yaml, or the name of a preset.")
    ],
    preset: Annotated[
        str, typer.Option("--preset", help="What each kind of a plugin is checked over: a preset, or its file.")
    ] = "grpo",
    reward_parts: Annotated[
        int, typer.Option("--reward-parts", min=1, help="Components that each reward has, for an advantage that reads them.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Check an objective against the rules that every objective keeps to; exit code 1 if it breaks one.

    On random steps, in float64, without a model: the cut into micro-batches and ranks, the order of sequences and padding
    change nothing, gradients are finite, the same step gives the same, every field acts.

    [dim]tepo objective check my_objective.py[/]

    [dim]tepo objective check my_preset.yaml[/]
    """
    with user_errors():
        objectives = [pair for target in targets for pair in objectives_of(target, preset)]
        notes = notes_on(dict.fromkeys(plugin for _, config in objectives for plugin in config.plugins))
    from tepo_megatron.core.objective.checking.check import run_checks

    checked: list[dict[str, Any]] = []
    for label, config in objectives:
        start = time.monotonic()
        findings = [finding._asdict() for finding in run_checks(config, reward_parts=reward_parts)]
        checked.append({"objective": label, "rules": findings, "seconds": round(time.monotonic() - start, 3)})
    if as_json:
        print_json(checked)
    else:
        _print_checked(checked)
        for note in notes:
            typer.echo(f"note: {note}")
    if any(finding["problem"] for each in checked for finding in each["rules"]):
        raise typer.Exit(1)


def _print_checked(checked: Sequence[Mapping[str, Any]]) -> None:
    for each in checked:
        broken = [finding for finding in each["rules"] if finding["problem"]]
        typer.echo(f"{each['objective']}: {len(each['rules'])} rules, {len(broken)} broken ({each['seconds']:.1f} s)")
        for finding in each["rules"]:
            typer.echo(f"  {'BROKEN' if finding['problem'] else 'ok':6} {finding['rule']}")
            if finding["problem"]:
                typer.echo(f"         {finding['problem']}")


def _said(entry: Preset) -> dict[str, Any]:
    return {"formula": entry.formula, "source": entry.source}


def _record(preset: Preset, config: ObjectiveConfig) -> dict[str, Any]:
    return {**_said(preset), "objective": config.model_dump(mode="json")}


def preset_table(presets: Mapping[str, Preset], configs: Mapping[str, ObjectiveConfig]) -> Table:
    """One row for each preset. Field names are those of the configuration below ``objective``."""
    table = _table("preset", "what is maximised; ÷ its denominator", "source", "composed of", keep="preset")
    for name, preset in presets.items():
        config = configs[name].model_dump(exclude_none=True)
        beside = [f"{key}: {_say(section)}" for key, section in config.items() if key not in (*_CHOICES, "preset", "plugins")]
        choices = " · ".join(_say(config[choice]) for choice in _CHOICES)
        table.add_row(f"[bold]{name}[/]", _plain(preset.formula), _plain(preset.source), "\n".join([choices, *beside]))
    return table


def correction_table() -> Table:
    """One row for each correction that goes beside a preset."""
    table = _table(
        "for a sampler that differs", "times the surrogate, w = π_old / π_sampler", "source", "fields", keep="source"
    )
    for name, correction in CORRECTIONS.items():
        fields = "\n".join(f"{key}: {_say(section)}" for key, section in correction.changes.items())
        table.add_row(f"[bold]{name}[/]", _plain(correction.formula), _plain(correction.source), fields)
    return table


def plugin_table(plugin: Plugin) -> Table:
    """The kinds of a plugin and their fields."""
    table = _table("field", "default", "meaning", keep="field")
    table.title, table.title_justify = f"{_plain(plugin.name)}, digest {plugin.digest}", "left"
    for field, default, meaning in kind_rows(plugin):
        table.add_row(f"[bold]{field}[/]" if " = " in field else field, _plain(default), _plain(meaning))
    return table


def field_table(config: ObjectiveConfig, name: str, preset: Preset) -> Table:
    """Every field of the sections that are on, with its value and what it means; sections that are off in one row."""
    table = _table("field", "value", "meaning", keep="field")
    table.title, table.title_justify = f"{_plain(name)}: {_plain(preset.formula)}\n{_plain(preset.source)}", "left"
    for path, value, meaning in _fields(config):
        table.add_row(path, _plain(value), _plain(meaning))
    return table


def _fields(section: Section, path: str = "objective") -> Iterator[tuple[str, str, str]]:
    """(dotted path, value, meaning) of each field; a section's row has its kind as the value and the kind's meaning."""
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}.{name}"
        if name == "kind":
            continue
        if not isinstance(value, Section):
            yield here, "off" if value is None else _number(value), field.description or ""
            continue
        yield here, str(getattr(value, "kind", "on")), type(value).__doc__ or ""
        yield from _fields(value, here)


def _table(*columns: str, keep: str) -> Table:
    """An empty table whose column ``keep`` is never broken over lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == keep)
    return table


def _plain(text: str) -> str:
    """A docstring or formula on one line; no bracket of it is taken for a style."""
    from rich.markup import escape

    return escape(" ".join(text.replace("``", "`").split()))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _say(section: Mapping[str, Any]) -> str:
    """A section of the configuration in a few words: its kind, then its other fields."""
    values = [f"{key} {_number(value)}" for key, value in section.items() if key != "kind"]
    kind = section.get("kind")
    if not values:
        return str(kind)
    return f"{kind} ({', '.join(values)})" if kind else ", ".join(values)
