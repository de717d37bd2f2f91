"""`tepo_megatron.train(…)` in one process that trains twice, with closures, and once on ranks that it starts; from recorded
rollouts, so without servers.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import assert_none_names
from tests.support.programs import rows, run_python, same_bytes, without_times

PROGRAM = '''
import json, os, signal, sys
from pathlib import Path
import yaml
import tepo_megatron
from tepo_megatron.tools.faults.workshop import REPLAYED, make_rollouts

folder = Path(sys.argv[1])
run = folder / "run.yaml"
run.write_text("name: faults\\nmodel: {path: builtin:tiny}\\n")
settings = dict(each.split("=", 1) for each in REPLAYED)
settings = {name: yaml.safe_load(value) for name, value in settings.items()}
settings |= {"rollout.replay": make_rollouts(folder / "rollouts", 2), "train.steps": 2}
told = []


class Mine(tepo_megatron.Callback):
    """Writes down what it is told; after the first step it may stop the run."""

    def __init__(self, stop=False):
        self.stop = stop

    def on_run_begin(self, run):
        told.append(["begin", run.step, [row["step"] for row in run.rows]])

    def on_rollouts(self, step, rollouts):
        told.append(["rollouts", step, sum(rollout.reward for rollout in rollouts)])

    def on_checkpoint(self, step, folder):
        told.append(["checkpoint", step, (folder / "state.json").exists()])

    def on_step_end(self, step, metrics):
        told.append(["step", step, metrics.get("loss")])
        if step == 1 and self.stop:
            raise tepo_megatron.Stop("enough")

    def on_run_end(self, step):
        told.append(["end", step, None])


BESIDE = """
import json
from pathlib import Path
import tepo_megatron

def one(problem, response):
    return 1.0

class Heard(tepo_megatron.Callback):
    def on_step_end(self, step, metrics):
        with Path(__file__).with_name("heard.jsonl").open("a") as file:
            print(json.dumps([step, metrics.get("loss")]), file=file)
"""


def train_on_ranks(out):
    """What it trains with are names of a file, since ranks are processes of their own."""
    (folder / "beside.py").write_text(BESIDE)
    sys.path.append(str(folder))
    import beside
    ranks = {"engine.parallel": {"tp": 2, "sequence_parallel": True}}
    result = tepo_megatron.train(run, reward=beside.one, callbacks=[beside.Heard], output=folder / out, **settings, **ranks)
    return {"losses": result.column("loss"), "model": str(result.model)}


def train(out, callback, **options):
    told.clear()
    result = tepo_megatron.train(
        run, reward=lambda problem, response: 1.0, callbacks=[callback], output=folder / out, **settings, **options
    )
    return {"steps": result.column("loss")[0], "told": list(told)}


environment, handlers = dict(os.environ), [signal.getsignal(number) for number in (2, 15, 10)]
notes = {
    "whole": train("whole", Mine()),
    "stopped": train("cut", Mine(stop=True)),
    "resumed": train("cut", Mine(), resume=True),
    "ranks": train_on_ranks("ranks"),
}
assert dict(os.environ) == environment
assert [signal.getsignal(number) for number in (2, 15, 10)] == handlers
(folder / "notes.json").write_text(json.dumps(notes))
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    (folder / "program.py").write_text(PROGRAM)
    done = run_python(folder / "program.py", folder)
    assert "Traceback" not in done.stdout + done.stderr
    assert_none_names(folder)
    return folder


@pytest.fixture(scope="module")
def notes(trained: Path) -> dict[str, Any]:
    noted: dict[str, Any] = json.loads((trained / "notes.json").read_text())
    return noted


def test_callbacks_are_told_of_a_whole_run_in_its_order(trained: Path, notes: dict[str, Any]) -> None:
    note = notes["whole"]
    assert note["steps"] == [1, 2]
    assert [each[:2] for each in note["told"]] == [
        ["begin", 0],
        ["step", 0],
        *([what, step] for step in (1, 2) for what in ("rollouts", "checkpoint", "step")),
        ["end", 2],
    ]
    assert all(whole for what, _, whole in note["told"] if what == "checkpoint")
    losses = [loss for what, step, loss in note["told"] if what == "step" and step]
    assert losses == [row["loss"] for row in rows(trained / "whole")[1:]]


def test_a_run_that_a_callback_ends_goes_on_to_the_same_bits(trained: Path, notes: dict[str, Any]) -> None:
    assert notes["stopped"]["steps"] == [1]
    assert notes["stopped"]["told"][-1] == ["end", 1, None]
    assert notes["resumed"]["told"][0] == ["begin", 1, [0, 1]]
    assert without_times(trained / "cut") == without_times(trained / "whole")
    same_bytes(trained / "cut", trained / "whole", "model/model.safetensors")


def test_a_run_on_ranks_that_it_starts_is_the_run_of_one(trained: Path, notes: dict[str, Any]) -> None:
    """But for the order of sums; its callback is told by rank 0, of each step once."""
    steps, losses = notes["ranks"]["losses"]
    assert steps == [1, 2]
    assert losses == pytest.approx([row["loss"] for row in rows(trained / "whole")[1:]], rel=1e-3, abs=1e-6)
    heard = [json.loads(line) for line in (trained / "heard.jsonl").read_text().splitlines()]
    assert heard == [[0, None], *([step, loss] for step, loss in zip(steps, losses, strict=True))]
    resolved = (trained / "ranks" / "resolved.yaml").read_text()
    assert f"verifier: {trained}/beside.py:one" in resolved
    assert f"{trained}/beside.py:Heard" in resolved
    assert notes["ranks"]["model"] == str(trained / "ranks" / "model")
