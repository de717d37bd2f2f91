"""What this machine and environment have, what they lack, and what it would enable: ``tepo doctor``."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from tepo_megatron.doctor_checks import CHECKS, Check

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "dim", "fail": "red"}


def diagnose(checks: Sequence[Callable[[], Check]] = CHECKS) -> list[Check]:
    """Runs every check; one that fails by an error of its own is reported as such, and does not end the others."""
    found = []
    for check in checks:
        try:
            found.append(check())
        except Exception as error:
            name, detail = check.__name__.lstrip("_"), f"{type(error).__name__}: {error}"
            found.append(Check(name, "warn", detail, "this check itself failed"))
    return found


def is_fit(checks: Sequence[Check]) -> bool:
    """Whether nothing that a run on CPU needs is missing or broken."""
    return not any(check.needed and check.status in ("missing", "fail") for check in checks)


def doctor_json(checks: Sequence[Check]) -> str:
    return json.dumps(
        {"fit_for_cpu": is_fit(checks), "checks": [asdict(check) for check in checks]}, indent=2, ensure_ascii=False
    )


def doctor_table(checks: Sequence[Check], purpose: str = "A run on CPU") -> Table:
    """One row a check; the caption is the verdict on ``purpose``."""
    verdict = f"[green]{purpose} has all that it needs.[/]"
    if not is_fit(checks):
        broken = [check.name for check in checks if check.needed and check.status in ("missing", "fail")]
        verdict = f"[red]{purpose} still needs: {escape(', '.join(broken))}.[/]"
    table = Table(title=f"tepo doctor, {platform.node()}", title_justify="left", caption=verdict, caption_justify="left")
    for heading in ("", "status", "found", "what it enables, or how to mend it"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        status = f"[{_COLOURS[check.status]}]{check.status}[/]"
        table.add_row(check.name, status, escape(check.detail), escape(check.advice))
    return table
