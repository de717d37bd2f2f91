"""`tepo faults --quick`: a few faults of every class, and nothing is lost. bash scripts/test.sh --long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tepo_megatron.tools.faults.run import CLASSES
from tests.support.processes import assert_none_names


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk and become another user")
@pytest.mark.timeout(7200)  # for what hangs: three minutes on two idle cores, ten times as long beside other tests, and more
def test_a_few_faults_of_every_class_are_survived_or_refused(tmp_path: Path) -> None:
    out = tmp_path / "faults"
    command = [sys.executable, "-m", "tepo_megatron", "faults", "--quick", "--seed", "1", "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    entries = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()[1:]]
    lost = [entry for entry in entries if entry["result"] == "lost"]
    assert not lost, json.dumps(lost, indent=1)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = Counter(entry["class"] for entry in entries)
    assert {name: counts[name] for name in counts if name != "ending"} == {name: kind.quick for name, kind in CLASSES.items()}
    assert "lost" in done.stdout  # the table's column
    assert (out / "faults.md").read_text().startswith("# Faults, injected")
    assert_none_names(out)
