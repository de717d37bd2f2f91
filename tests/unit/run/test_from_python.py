"""Callbacks, and what a program gives to ``tepo_megatron.train``."""

import json
import math
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tepo_megatron
from tepo_megatron.config import ObjectiveConfig, RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.objective.custom import Plugin
from tepo_megatron.errors import is_ours
from tepo_megatron.run import api, training
from tepo_megatron.run.api import TrainResult
from tepo_megatron.run.callbacks import NO_EXTENSIONS, Callback, Callbacks, EarlyStopping, Extensions, RunInfo, Stop
from tepo_megatron.runtime.preemption import StopRequested, StopSignals
from tepo_megatron.tasks.reward.verifiers import last_word, load_verifier, resolve_verifier


class Told(Callback):
    """Writes down what it is told; raises ``error`` in ``hook`` at ``step``."""

    def __init__(self, hook: str = "", step: int = 0, error: BaseException | None = None) -> None:
        self.hook, self.step, self.error = hook, step, error
        self.calls: list[tuple[str, int]] = []

    def _told(self, hook: str, step: int) -> None:
        self.calls.append((hook, step))
        if (hook, step) == (self.hook, self.step):
            raise self.error

    def on_run_begin(self, run: RunInfo) -> None:
        self._told("on_run_begin", run.step)

    def on_rollouts(self, step: int, rollouts: Any) -> None:
        self._told("on_rollouts", step)

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._told("on_step_end", step)

    def on_run_end(self, step: int) -> None:
        self._told("on_run_end", step)


@pytest.mark.parametrize(("hook", "error"), [("on_rollouts", Stop()), ("on_step_end", ValueError("no such thing"))])
def test_a_run_that_a_callback_ends_is_saved_once_and_whole(hook: str, error: Exception, reference_run: Any) -> None:
    """Also where no checkpoint was due. A step whose rollouts end the run is trained, and other callbacks hear of it. An error
    becomes one sentence, and no callback is called again.
    """
    first, second = Told(hook, 2, error), Told()
    run = reference_run({"train": {"steps": 5, "save_every": 0}}, callbacks=[first, second]).run()
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert run.noted("save ") == ["save 2"]
    assert run.loop.stopping.saved_step == 2
    callbacks, steps = run.loop.rank0.callbacks, [(hook, step) for step in (1, 2) for hook in ("on_rollouts", "on_step_end")]
    assert not callbacks.go_on
    assert first.calls == [("on_run_begin", 0), ("on_step_end", 0), *steps]
    if isinstance(error, Stop):
        assert second.calls == first.calls
        assert callbacks.stopped == "Told ended the run at step 2: it gave no reason"
        return
    assert second.calls == first.calls[:-1]
    with pytest.raises(RuntimeError) as caught:
        callbacks.raise_failure(saved_step=2)
    assert is_ours(caught.value)
    begin, _, rest = str(caught.value).partition(f" ({__file__}:")
    assert begin == "the callback Told raised ValueError: no such thing in on_step_end at step 2"
    assert rest.endswith("; the newest checkpoint is step_000002: continue with the same command and --resume, without --from")


def test_after_an_error_at_its_end_a_run_is_complete(reference_run: Any) -> None:
    run = reference_run({"log.curves": False})
    extensions = Extensions([Told("on_run_end", 2, KeyError("x"))], run.reward)
    says = rf"raised KeyError: 'x' in on_run_end .*; the run is complete in {run.config.output}$"
    with StopSignals(ends=False).borrowed(), pytest.raises(RuntimeError, match=says):
        training.train_model(run.config, extensions)
    assert (run.config.output / "model").is_dir()


def test_a_run_that_cannot_begin_does_not() -> None:
    for error, says in (
        (KeyError("x"), "raised KeyError: 'x' in on_run_begin"),
        (SystemExit(3), "raised SystemExit: 3 in on_run_begin"),
        (Stop("now"), "ended the run at step 0: now;"),
    ):
        with pytest.raises(RuntimeError, match=says):
            Callbacks([Told("on_run_begin", 0, error)]).begin(RunInfo(RunConfig(), 0, []))
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is no error of a callback
        Callbacks([Told("on_step_end", 0, KeyboardInterrupt())]).tell("on_step_end", 0, 0, {})


class Reads:
    @torch.no_grad()
    def on_rollouts(self, step: int, rollouts: Any) -> None:
        json.loads("{")

    def on_run_end(self, step: int) -> None:
        json.loads("{")


@pytest.mark.parametrize("hook", ["on_rollouts", "on_run_end"])
def test_an_error_names_the_callbacks_line_not_that_of_a_library_or_decorator(hook: str) -> None:
    callbacks = Callbacks([Reads()])
    callbacks.tell(hook, 1, *([1, []] if hook == "on_rollouts" else [1]))
    assert re.search(rf"raised JSONDecodeError: .* in {hook} at step 1 \({re.escape(__file__)}:\d+\)$", str(callbacks.failure))


FILE = """
from tepo_megatron.run.callbacks import Callback
class Mine(Callback):
    def __init__(self, name="none"):
        self.name = name
    def on_step_end(self, step, metrics):
        pass
class Slip:
    def on_step_ended(self, step, metrics):
        pass
class Later:
    async def on_step_end(self, step, metrics):
        pass
class Nothing:
    pass
ready = Mine("ready")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


def config(*callbacks: Any) -> RunConfig:
    return RunConfig.model_validate({"train": {"callbacks": callbacks}})


def test_callbacks_come_from_files_with_arguments_and_as_objects(file: Path) -> None:
    given = config(f"{file}:Mine", {"callback": f"{file}:Mine", "kwargs": {"name": "other"}}, f"{file}:ready", "early_stopping")
    mine = Told()
    made: list[Any] = list(Callbacks.of(given, [mine, EarlyStopping]).callbacks)
    assert [each.name for each in made[:3]] == ["none", "other", "ready"]
    assert made[4] is mine
    assert [type(each) for each in made[3::2]] == [EarlyStopping, EarlyStopping]


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        ("early_stop", "unknown callback 'early_stop'; known: early_stopping, or your own"),
        ("own.py:None_", "has no function None_"),
        ("nowhere.py:Mine", "there is no file"),
        ({"callback": "own.py:Mine", "kwargs": {"nam": 1}}, r"cannot be made with kwargs nam: TypeError: .*unexpected keyword"),
        ({"callback": "own.py:ready", "kwargs": {"name": 1}}, "takes kwargs only where it is a class"),
        ({"callback": "early_stopping", "kwargs": {"patience": 0}}, "patience = 0 must be 1 or more"),
        ("own.py:Slip", "has a method on_step_ended, which nothing calls; did you mean on_step_end?"),
        ("own.py:Later", "has an async method on_step_end"),
        ("own.py:Nothing", "Nothing is no callback: it has none of the methods on_run_begin"),
    ],
)
def test_a_name_that_is_no_callback_is_refused(file: Path, callback: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        Callbacks.of(config(callback))
    assert is_ours(caught.value)


def test_early_stopping_compares_a_row_once() -> None:
    """It compared all rows at every row: 8,000 of a resumed run took a quarter of a minute."""
    compared: list[float] = []

    class Value(float):
        def __gt__(self, other: float) -> bool:
            compared.append(self)
            return float(self) > other

    rows = [{"step": step, "loss": Value(step)} for step in range(100)]
    EarlyStopping("loss").on_run_begin(RunInfo(RunConfig(), 100, rows))
    assert compared == list(range(100))


@given(
    values=st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(-10, 10)), max_size=30),
    patience=st.integers(1, 4),
    mode=st.sampled_from(["max", "min"]),
    delta=st.sampled_from([0.0, 0.5]),
    resumed=st.integers(0, 30),
)
def test_early_stopping_waits_for_patience_rows_and_a_resumed_run_goes_on_counting(
    values: list[float | None], patience: int, mode: Any, delta: float, resumed: int
) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "loss": value} for step, value in enumerate(values)]
    seen = [
        (step, value if mode == "max" else -value) for step, value in enumerate(values) if value is not None and value == value
    ]
    expected, best, since = None, -math.inf, 0
    for step, value in seen:
        best, since = (value, 0) if value > best + delta else (best, since + 1)
        if since >= patience and step >= resumed:
            expected = step
            break
    stopping = EarlyStopping("loss", patience, mode, delta)
    stopping.on_run_begin(RunInfo(RunConfig(), min(resumed, len(rows)), rows[:resumed]))
    found = None
    for row in rows[resumed:]:
        try:
            stopping.on_step_end(row["step"], row)
        except Stop:
            found = row["step"]
            break
    assert found == expected
    stopping = EarlyStopping("loss", 3, "min")
    for step, value in ((1, 4.0), (2, 1.0), (3, 2.0), (2, 5.0), (3, 5.0)):  # a rollback undid the first steps 2 and 3
        stopping.on_step_end(step, {"loss": value})
    with pytest.raises(Stop, match="loss was 4 at step 1"):
        stopping.on_step_end(4, {"loss": 5.0})
    blind = RunConfig.model_validate({"evaluate": {"every": 0}})
    for begin in (lambda: EarlyStopping().on_run_begin(RunInfo(blind, 0, [])), lambda: Callbacks.of(blind, [EarlyStopping])):
        with pytest.raises(ValueError, match=r"accuracy/greedy is measured by evaluations, but"):
            begin()


@pytest.mark.parametrize(("restarted", "step", "goes_on"), [(True, 3, False), (True, 4, True), (False, 3, True)])
def test_a_run_that_restarts_at_an_early_stop_ends(restarted: bool, step: int, goes_on: bool) -> None:
    rows = [{"step": number, "loss": float(number)} for number in range(4)] + [{"step": 4}]
    callbacks = Callbacks([EarlyStopping("loss", 3, "min")])
    callbacks.begin(RunInfo(RunConfig(), step, rows[: step + 1], restarted))
    assert callbacks.go_on == goes_on


@pytest.mark.parametrize(("attempt", "job", "last"), [("1", "7", 2), ("0", "7", 3), ("1", "8", 3)])
def test_ranks_that_were_lost_after_an_early_stop_end_the_run_again(
    attempt: str, job: str, last: int, reference_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the user, who resumes the run to go on, also if the ranks of that job are lost then."""
    monkeypatch.setenv("TEPO_LAUNCHED_JOB", "7")
    settings = {"train": {"steps": 4, "save_every": 0}}
    assert reference_run(settings, callbacks=[EarlyStopping("update/skipped", 1)]).run().rows[-1]["step"] == 2
    monkeypatch.setenv("TEPO_LAUNCHED_JOB", job)
    monkeypatch.setenv("TEPO_ATTEMPT", attempt)
    resumed = reference_run({**settings, "train.resume": True}, callbacks=[EarlyStopping("update/skipped", 1)]).run()
    assert resumed.rows[-1]["step"] == last


def test_the_documents_callback_ends_a_run_by_its_entropy() -> None:
    """And not at a row whose updates were all skipped."""
    document = (Path(__file__).parents[3] / "docs/guides/from-python.md").read_text()
    made: dict[str, Any] = {}
    exec(document.partition("# mine/callbacks.py\n")[2].partition("```")[0], made)
    for row in ({}, {"entropy/mean": None}, {"entropy/mean": 0.5}):
        made["Watch"]().on_step_end(1, row)
    with pytest.raises(Stop, match=r"the entropy is 0\.001"):
        made["Watch"]().on_step_end(1, {"entropy/mean": 0.001})


def started(
    config: Any = None, interrupt: Callable[[list[int]], object] = bool, **arguments: Any
) -> tuple[RunConfig, Extensions]:
    """The configuration and the objects of the run that such a call would start. ``interrupt`` is called at its end."""
    runs: list[tuple[RunConfig, Extensions]] = []

    def note(config: RunConfig, extensions: Extensions = NO_EXTENSIONS) -> None:
        runs.append((config, extensions))
        if config.engine.parallel.world_size == 1:
            StopSignals.current().defer()
            interrupt([])

    def run_ranks(arguments: list[str], *_: Any, stops: list[int], **__: Any) -> tuple[int, str]:
        note(load_run(arguments[1]))
        interrupt(stops)
        return 0, ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "prepare_run", lambda config, *_, **__: config)
        patch.setattr(training, "train_model", note)
        patch.setattr(api, "run_ranks", run_ranks)
        patch.setattr(api, "read_metrics", lambda path: [])
        tepo_megatron.train(config, **arguments)
    return runs[0]


def test_a_warning_names_the_callers_line_and_comes_once() -> None:
    with pytest.warns(UserWarning, match="low = 0.2 with scale = length") as caught:
        started({"objective.trust_region.low": 0.2})
    assert [warning.filename for warning in caught] == [__file__]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0$"), max_size=20)
VALUE = st.one_of(TEXT, st.integers(-9, 9), st.floats(-1e9, 1e9), st.booleans(), st.none())


@settings(max_examples=10)
@example(kwargs={"text": ["\x85", "\u2028", "🙂", "1e5", "no", "null", "a: b", "\\n", '"', "~"]}, lr=1e-6)
@given(kwargs=st.dictionaries(TEXT, VALUE, max_size=3), lr=st.floats(1e-9, 1e-2))
def test_settings_are_taken_as_the_values_that_they_are(kwargs: dict[str, Any], lr: float) -> None:
    """No text becomes a number, no number a text, whatever YAML makes of such words."""
    config = started({"reward": {"verifier": "exact", "kwargs": kwargs}, "optimizer.lr": lr})[0]
    assert config.reward.kwargs == kwargs
    assert config.optimizer.lr == lr


def test_arguments_change_the_configuration_and_keep_the_rest() -> None:
    base = load_run(None, ["objective.preset=grpo", "train.steps=7", "output=out/base"])
    changed = started(base, train={"minibatches": 2}, output=Path("out/other"), objective="tepo")[0]
    assert changed.objective == RunConfig().objective
    assert (changed.train.steps, changed.train.minibatches, changed.output) == (7, 2, Path("out/other"))
    assert started(base)[0] == base.with_dtype("float32")
    assert started({"train.steps": 3}, objective=ObjectiveConfig(preset="grpo"))[0].objective == base.objective
    for resume, expected in ((True, (True, None)), ("auto", ("auto", None)), ("step_000004", (True, "step_000004"))):
        train = started(resume=resume)[0].train
        assert (train.resume, train.resume_from) == expected
    resumed = load_run(None, ["train.resume=true", "train.resume_from=step_000002"])
    for resume, expected in ((None, (True, "step_000002")), (False, (False, None))):
        train = started(resumed, resume=resume)[0].train
        assert (train.resume, train.resume_from) == expected
    with_callback, stopping = load_run(None, ['train.callbacks=["early_stopping"]']), EarlyStopping()
    named = {"callback": "early_stopping", "kwargs": {"patience": 2}}
    config, extensions = started(with_callback, callbacks=[stopping, named])
    assert [getattr(item, "callback", item) for item in config.train.callbacks] == ["early_stopping"] * 2
    assert extensions.callbacks == (stopping,)
    assert started(None, callbacks=stopping)[1].callbacks == (stopping,)
    assert len(started(None, callbacks="early_stopping")[0].train.callbacks) == 1


@pytest.mark.parametrize(
    ("base", "arguments", "overrides"),
    [
        ({"train": {"steps": 10}}, {"train": {"minibatches": 2}}, ["train.steps=10", "train.minibatches=2"]),
        ({"objective": {"preset": "grpo"}}, {"objective": {"kl_mask": None}}, ["objective={preset: grpo, kl_mask: null}"]),
        ({"train.steps": 10, "train": {"save_every": 1}}, {"train": {"steps": 7}}, ["train.save_every=1", "train.steps=7"]),
        ({"reward": {"workers": 4}}, {"reward": {"verifier": "exact"}}, ["reward.workers=4", "reward.verifier=exact"]),
        ({"environment": {"max_turns": 3}}, {"env": "calculator"}, ["environment={name: calculator, max_turns: 3}"]),
        (None, {"env": "calculator", "environment": {"max_turns": 3}}, ["environment={name: calculator, max_turns: 3}"]),
    ],
)
def test_sections_are_merged_and_arguments_count_most(base: Any, arguments: dict[str, Any], overrides: list[str]) -> None:
    assert started(base, **arguments)[0] == load_run(None, overrides).with_dtype("float32")


def test_what_is_wrong_with_settings_is_said_as_of_overrides() -> None:
    for base, wrong, says in (
        (None, {"train": {"stepz": 3}}, r"train\.stepz: unknown key \(got 3\); did you mean train\.steps\?"),
        (RunConfig(), {"train.steps": "many"}, r'train\.steps: got "many"; allowed: an integer > 0'),
        (RunConfig(), {"reward": {"verifier": last_word}}, "a setting cannot be function"),
        (RunConfig(), {"rewrad": last_word}, r"rewrad is no argument that takes a function; did you mean reward\?"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            started(base, **wrong)
        assert is_ours(caught.value)


def test_a_kind_of_this_process_alone_is_refused() -> None:
    """A resumed run could not read it."""
    plugin = str(Path(__file__).parents[2] / "support/own_kinds.py")
    band: Any = next(kind for kind in Plugin.load(plugin).kinds if kind.__name__ == "Band")
    Other: Any = type("Other", (band,), {"__module__": __name__})
    good, *wrong = (ObjectiveConfig(preset="grpo", plugins=[plugin], trust_region=kind()) for kind in (band, Other))
    wrong.append(ObjectiveConfig(preset="grpo", trust_region=band()))
    assert started(RunConfig(objective=good))[0].objective == good == started(objective=good)[0].objective
    for objective in wrong:
        for arguments in ({"config": RunConfig(objective=objective)}, {"objective": objective}):
            with pytest.raises(ValueError, match=r"objective\.trust_region = \w+\(\) is in .*as \{'kind': 'band'\}") as caught:
                started(**arguments)
            assert is_ours(caught.value)


def test_a_folder_with_a_run_is_refused_with_the_arguments_to_give(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_000003").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoints/step_000003/state.json"):
        (tmp_path / name).write_text('{"step": 3}\n')
    with pytest.raises(ValueError, match="already holds a run") as caught:
        tepo_megatron.train(output=tmp_path)
    assert "resume=True" in str(caught.value)
    assert "start again (overwrite=True)" in str(caught.value)
    before = sorted(tmp_path.rglob("*"))
    for wrong, says in (
        ({"model.path": "/nowhere"}, "/nowhere"),
        ({"data.train": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"train.max_restarts": 1}, "nothing would start these ranks again"),
        ({"engine.parallel.tp": 2}, "reward=lambda is in this process alone"),
        ({"engine.parallel.tp": 2, "reward.verifier": "nowhere.py:score"}, "there is no file .*nowhere.py"),
    ):
        reward = None if "reward.verifier" in wrong else lambda problem, response: 1.0
        with pytest.raises(ValueError, match=says):
            tepo_megatron.train(wrong, reward=reward, output=tmp_path, overwrite=True)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_function_goes_by_a_name_that_another_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(reward=last_word)[0].reward.verifier == "tepo_megatron.tasks.reward.verifiers:last_word"
    (tmp_path / "own_rewards.py").write_text("def near(problem, response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_rewards  # type: ignore[import-not-found]

    config, extensions = started(reward=own_rewards.near)
    assert (config.reward.verifier, extensions.reward) == (f"{tmp_path / 'own_rewards.py'}:near", None)
    assert load_verifier(config.reward.verifier)(None, "") == 1.0
    del sys.modules["own_rewards"]


def test_what_has_no_such_name_is_given_as_it_is() -> None:
    def inner(problem: Any, response: str) -> float:
        return 1.0

    cell = ModuleType("__main__")  # as a notebook's
    exec("def near(problem, response):\n    return 1.0", cell.__dict__)
    for function, name in ((inner, "inner"), (lambda problem, response: 1.0, "lambda"), (cell.near, "near")):
        config, extensions = started(reward=function)
        assert extensions.reward is function
        assert config.reward.verifier == f"(python):{name}"
        with pytest.raises(ValueError, match=rf"give it again, tepo_megatron.train\(…, reward={name}\)"):
            resolve_verifier(config.reward.verifier)


def test_ranks_of_their_own_get_names_alone() -> None:
    two: dict[str, Any] = {"engine.parallel.tp": 2}
    named = started(two, reward=last_word, callbacks=["early_stopping", EarlyStopping])[0]
    assert named.reward.verifier.endswith(":last_word")
    assert named.train.callbacks == ("early_stopping", "tepo_megatron.run.callbacks:EarlyStopping")
    assert load_run(None, ["engine.parallel.tp=2"]).train.callbacks == ()
    for wrong, says in (
        ({"reward": lambda problem, response: 1.0}, r"reward=lambda is in this process alone, and the 2 ranks"),
        ({"callbacks": [EarlyStopping(patience=2)]}, r"callbacks=\[EarlyStopping\] is in this process alone"),
    ):
        with pytest.raises(ValueError, match=says):
            started(two, **wrong)


@pytest.mark.parametrize("tp", [1, 2])
def test_ctrl_c_after_the_last_step_is_raised_when_the_run_is_complete(tp: int) -> None:
    def interrupt(stops: list[int]) -> None:
        """With several ranks, what passes the signal on to them is told."""
        if tp == 1:
            signal.raise_signal(signal.SIGINT)
        stops.append(signal.SIGINT)

    with pytest.raises(StopRequested, match=r"Ctrl-C: the run is complete in out/run") as caught:
        started({"engine.parallel.tp": tp, "output": "out/run"}, interrupt)
    assert caught.value.number == signal.SIGINT


def test_signals_to_one_rank_give_it_the_time_that_the_run_names() -> None:
    def interrupt(_: list[int]) -> None:
        for number, most in ((signal.SIGUSR1, 3000.0), (signal.SIGTERM, 2000.0)):
            signal.raise_signal(number)
            assert most - 1000 < StopSignals.current().seconds_left() <= most

    with pytest.raises(StopRequested, match="SIGUSR1: the run is complete"):
        started({"train": {"grace_s": 2000.0, "warning_s": 3000.0}}, interrupt)


def test_a_result_gives_columns_and_the_best_row() -> None:
    rows = [
        {"step": 0, "a": 0.5},
        {"step": 1, "a": None, "loss": 2.0},
        {"step": 2, "a": 0.7, "loss": 1.0},
        {"step": 3, "a": 0.7},
    ]
    result = TrainResult(Path(), Path(), RunConfig(), rows)
    assert result.step == 3
    assert result.column("a") == ([0, 2, 3], [0.5, 0.7, 0.7])
    assert result.best("a")["step"] == 2
    assert result.best("loss", min)["step"] == 2
    with pytest.raises(KeyError, match="no row has 'b'; there are a, loss, step"):
        result.column("b")
