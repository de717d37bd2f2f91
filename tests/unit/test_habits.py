"""What runs before a commit, and for a pull request, is what ``make check`` and ``.ci/run`` run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import tepo_megatron

ROOT = Path(__file__).parents[2]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_a_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert recipe is not None
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    hooks = [hook for source in read(".pre-commit-config.yaml")["repos"] for hook in source["hooks"]]
    assert [re.sub(r"^bash -c '(.*)'$", r"\1", hook["entry"]) for hook in hooks] == commands
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)


def test_a_pull_request_runs_what_ci_runs() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"checks": ["bash .ci/run"], "docs": ["make docs"]}
    assert "make check" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_a_form_for_issues_has_what_github_asks_for(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    assert all(field["attributes"]["label"] for field in content["body"])


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(tepo_megatron.__version__)} — \d{{4}}-\d{{2}}-\d{{2}}", sections[1])
