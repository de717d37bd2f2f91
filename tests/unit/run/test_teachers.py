"""Teachers on ranks and served ones in whole runs, on the reference trainer and sampler; and what is refused."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.config.load import load_run
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import TOP_TOKEN, Rollout, WeightsVersion
from tepo_megatron.run import checks
from tepo_megatron.run.rank0 import Rank0
from tepo_megatron.run.sampling import served_teachers as served_teachers_module
from tepo_megatron.run.sampling.group_worker import BusyClock, GroupWorker
from tepo_megatron.run.sampling.groups import Group
from tepo_megatron.run.sampling.journal import GroupStore, Journal
from tepo_megatron.run.sampling.served_teachers import ServedTeachers
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.runtime.machine import Machine
from tepo_megatron.sampler.fleet.external import serve_node, shared_key
from tepo_megatron.sampler.protocol import NO_SERVERS, Scores, ServerDied
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.sampler.vllm.resources import worker_cores
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.protocol import RewardResult
from tepo_megatron.trainer.run_compatibility import served_teachers
from tests.support.example_runs import train_on_references
from tests.support.processes import eventually
from tests.support.programs import TIMEOUT_S
from tests.support.reference_sampler import ReferenceSampler

TINY = Path("examples/tiny/run.yaml")
SMALL = (
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.sampling.max_new_tokens=6"),
    *("train.minibatches=2", "evaluate.every=0", "rollout.record=true", "train.save_every=1"),
)
TEPO = ("objective.distill.coefficient=0.5",)
TOP_K = ("objective.distill={of: top_k, k: 3, divergence: forward_kl, coefficient: 0.5}",)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's architecture and tokenizer, other weights."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(resolve_model_path("builtin:tiny"), folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    weights = {name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Run = Callable[..., list[dict[str, Any]]]
Whole = Callable[..., tuple[Path, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def start(teacher: Path, few_problems: Path) -> Run:
    def start(output: Path, place: str, *overrides: str, steps: int = 2) -> list[dict[str, Any]]:
        settings = [f"teachers.big.path={teacher}", f"teachers.big.place={place}", f"train.steps={steps}"]
        data = [f"data.train={few_problems}", "data.heldout=null"]
        return train_on_references(TINY, output, *SMALL, *settings, *data, *overrides)

    return start


@pytest.fixture
def run(start: Run, tmp_path: Path) -> Run:
    return lambda name, *arguments, **options: start(tmp_path / name, *arguments, **options)


@pytest.fixture(scope="module")
def whole(start: Run, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Makes a run that nothing disturbs, once for all tests."""

    @cache
    def make(place: str, *objective: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, start(folder, place, *objective)

    return make


def learnt(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float, float]]:
    return [(row["loss"], row["grad_norm"], row["distill/divergence"]) for row in rows[1:]]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_served_teacher_and_one_on_the_ranks_give_the_same_loss(run: Run, whole: Whole, tmp_path: Path) -> None:
    """Also as a replay of the record, without a server: the same bits."""
    (served, served_rows), (on_ranks, rows) = whole("server", *TEPO), whole("ranks", *TEPO)
    for ours, theirs in zip(learnt(served_rows), learnt(rows), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert ours[1] > 0
    rollouts = Record.read(served / "rollouts", 1).rollouts
    assert all(rollout.teacher_logprobs is not None for rollout in rollouts)
    assert all(rollout.teacher_logprobs is None for rollout in Record.read(on_ranks / "rollouts", 1).rollouts)
    with pytest.raises(ValueError, match=r"has no log-probs of teachers\.big, which is served; record it again"):
        run("mixed", "server", *TEPO, f"rollout.replay={on_ranks / 'rollouts'}", "rollout.record=false")
    for place, recorded in (("server", served), ("ranks", on_ranks)):
        run(place, place, *TEPO, f"rollout.replay={recorded / 'rollouts'}", "rollout.record=false")
        assert weights(tmp_path / place) == weights(recorded)


@pytest.mark.slow
def test_a_served_teachers_top_k_is_recorded_replayed_and_resumed(run: Run, whole: Whole, tmp_path: Path) -> None:
    folder, rows = whole("server", *TOP_K)
    assert all(row["distill/divergence"] > 0 and 0 < row["distill/mass"] <= 1 + 1e-6 for row in rows[1:])
    assert all(0 < row["distill/agreement"] <= 1 for row in rows[1:])
    rollouts = Record.read(folder / "rollouts", 1).rollouts
    assert all(r.teacher_top is not None and r.teacher_top.shape == (r.response_ids.size, 3) for r in rollouts)
    assert Record.read(folder / "journal", 1).rollouts == rollouts
    replay = (f"rollout.replay={folder / 'rollouts'}", "rollout.record=false")
    assert learnt(run("replayed", "server", *TOP_K, *replay)) == learnt(rows)
    run("resumed", "server", *TOP_K, steps=1)
    run("resumed", "server", *TOP_K, "train.resume=true")
    assert weights(tmp_path / "replayed") == weights(tmp_path / "resumed") == weights(folder)
    with pytest.raises(ValueError, match=r"has the top 3 of teachers\.big, .* needs 4; .* or set distill\.k = 3"):
        run("other", "server", *TOP_K, *replay, "objective.distill.k=4")
    replay = (f"rollout.replay={whole('server', *TEPO)[0] / 'rollouts'}", "rollout.record=false")
    with pytest.raises(ValueError, match=r"has no top tokens of teachers\.big, .* needs 3; record it again"):
        run("none", "server", *TOP_K, *replay)


class BlockedSampler:
    """Scores nothing before ``go``, and is ended by ``stop``, as a server's processes are."""

    def __init__(self) -> None:
        self.scored, self.go, self.stopped = 0, threading.Event(), False

    def start(self) -> None: ...

    def score(self, tokens: list[int], k: int) -> Scores:
        self.scored += 1
        self.go.wait(TIMEOUT_S)
        if self.stopped:
            raise ServerDied("no server is left to score responses")
        return Scores([0.0] * (len(tokens) - 1), None)

    def stop(self) -> None:
        self.stopped = True
        self.go.set()

    def revive(self) -> None:
        raise RuntimeError("the rollout servers were stopped")


def test_scores_that_wait_end_with_the_run_and_with_a_reset(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a promise to start a server again, and without work for responses that are forgotten."""
    sampler, said, inputs = BlockedSampler(), list[str](), Mock(tokenizer=SimpleNamespace(eos_ids=(1,)))
    monkeypatch.setattr(served_teachers_module, "make_sampler", lambda *_, **__: sampler)
    settings = [f"teachers.big={{path: {teacher}, place: server, threads: 1}}", "objective.distill.of=sampled"]
    teachers = ServedTeachers(load_run(TINY, settings), inputs, said.append)
    task = teachers.judged(Mock())
    response = ResponseText("2", (3, 4))
    response.prompt_ids = (1, 2)
    for key in range(3):
        task.submit(key, Problem("p", "1+1=", "2"), response)
    assert eventually(lambda: sampler.scored == 1)
    task.reset()
    last = teachers.score("big", response)
    sampler.go.set()
    last.result(TIMEOUT_S)
    assert sampler.scored == 2
    sampler.go.clear()
    waiting = [teachers.score("big", response) for _ in range(20)]
    assert eventually(lambda: sampler.scored == 3)
    teachers.close()
    assert [waiting[0].exception(TIMEOUT_S).__class__, said, sampler.scored] == [ServerDied, [], 3]
    assert all(future.cancelled() for future in waiting[1:])


@pytest.mark.parametrize(("fails", "kind"), [("start", RuntimeError), ("score", RuntimeError), ("start", ValueError)])
def test_what_a_teachers_servers_raise_names_the_teacher_and_its_settings(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, kind: type[Exception]
) -> None:
    """One that does not start also ends the start of the run."""
    (tmp_path / "file").touch()
    sampler, inputs = Mock(), Mock(tokenizer=SimpleNamespace(eos_ids=(1,)))
    tiny = load_run(TINY, [])
    raising = {
        RuntimeError: lambda *_: shared_key(tmp_path / "file" / "registry"),
        ValueError: lambda *_: serve_node(tiny, model_dir=teacher, node=0, nodes=1),
    }
    getattr(sampler, fails).side_effect = raising[kind]
    monkeypatch.setattr(served_teachers_module, "make_sampler", lambda *_, **__: sampler)
    settings = [f"teachers.big={{path: {teacher}, place: server}}", "objective.distill.of=sampled"]
    teachers = ServedTeachers(load_run(TINY, settings), inputs, print)
    response = ResponseText("2", (3, 4))
    response.prompt_ids = (1, 2)
    message = r"teacher big: .*teachers\.big\.server\.registry.* a folder"
    with pytest.raises(kind, match=message):
        teachers.score("big", response).result(TIMEOUT_S)
    rank0: Any = SimpleNamespace(servers=Mock(), teachers=teachers)
    with pytest.raises(kind, match=message) if fails == "start" else nullcontext():
        Rank0.wait_until_ready(rank0)
    teachers.close()


@pytest.mark.parametrize(
    ("cores", "threads", "expected", "trainers"),
    [(8, "auto", ["1|4", "2"], 4), (8, "0-6", ["7|7", "0"], 1), (2, "auto", ["1|1", "0"], 1)],
)
def test_servers_of_teachers_leave_the_others_their_cores_if_any_are_left(
    cores: int, threads: str, expected: list[str], trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(config: ServerConfig, **options: Any) -> Mock:
        made.extend(worker_cores(config, config.count, options["cores"]))
        return Mock()

    monkeypatch.setattr(served_teachers_module, "available_cores", lambda: list(range(cores)))
    monkeypatch.setattr(served_teachers_module, "make_sampler", make)
    sources = [f"{{path: 'builtin:addition', name: {name}, teacher: {name}}}" for name in "ab"]
    settings = [f"rollout.server.cpu_threads={threads}", f"data.train=[{', '.join(sources)}]", *TEPO]
    settings += [f"teachers.{name}={{path: 'builtin:tiny', place: server}}" for name in "ab"]
    overlap = [
        "train.schedule=overlap",
        "rollout.uncorrected=true",
        "engine.cpu_threads=auto",
        "engine.parallel={tp: 1, sequence_parallel: false}",
    ]
    run = load_run(TINY, [*settings, *overlap, "teachers.a.server.tp=2"])
    teachers = ServedTeachers(run, Mock(), print)
    teachers.close()
    assert made == expected
    assert Placement(run, Machine()).trainer_threads(range(cores)) == trainers


def test_the_number_of_top_tokens_decides_what_a_journal_has() -> None:
    teacher = "teachers.a={path: x, place: server}"
    first, second, without = (load_run(None, [teacher, *item]) for item in (TOP_K, (*TOP_K, "objective.distill.k=4"), TEPO))
    assert served_teachers(first) != served_teachers(second)
    assert served_teachers(without) == {"addition": ["x", "none"]}


def draw_again(output: Path, rollout: Rollout, *settings: str, result: RewardResult | None = None) -> Group:
    """The rollout's group as a resumed run takes it from the disk."""
    store = GroupStore(Journal(load_run(None, [f"output={output}", *settings]), print, lambda *_: None), active=True)
    group = Group(0, 0, 0, Problem("p", "1", "1"), (1,), WeightsVersion(0), [rollout])
    store.write(replace(group, results={} if result is None else {0: result}))
    again = replace(group, samples=[None])
    store.fill(again, partial=False, now=WeightsVersion(0))
    return again


def test_a_group_that_is_drawn_again_has_its_top_tokens(tmp_path: Path) -> None:
    top = np.array([[(3, -0.25), (4, -1.5)]], TOP_TOKEN)
    rollout = Rollout("p", 0, [1], [3], [-1.0], "stop", WeightsVersion(0), teacher_logprobs=[-0.25], teacher_top=top)
    again = draw_again(tmp_path, rollout)
    assert again.results[0].of(rollout) == again.samples[0] == rollout


@pytest.mark.parametrize("settings", [(), ("environment.name=calculator",)])
def test_a_group_that_is_drawn_again_asks_a_verifier_that_failed_once_more(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Whatever reward.failed_reward has made of it. An episode cannot be judged again."""
    drawn = Rollout("p", 0, [1], [3], [-1.0], "stop", WeightsVersion(0), reward=0.0)
    again = draw_again(tmp_path, drawn, *settings, result=RewardResult(0.0, "gone"))
    assert again.samples[0] is not None
    expected = (0.0, {0: RewardResult(0.0)}, {0}) if settings else (None, {}, set())
    assert (again.samples[0].reward, again.results, again.asked) == expected


def test_a_group_of_which_a_part_was_judged_is_judged_again_as_a_whole() -> None:
    """What a verifier of groups says of one response depends on the others, and may differ the next time."""
    drawn = [Rollout("p", index, [1], [3], [-1.0], "stop", WeightsVersion(0)) for index in range(2)]
    group = Group(0, 0, 0, Problem("p", "1", "1"), (1,), WeightsVersion(0), [*drawn], results={0: RewardResult(0.5)})
    buffer, task, nothing = Mock(running={0: group}), Mock(scores_groups=True), Mock()
    worker = GroupWorker(buffer, task, nothing, BusyClock(), str, 0, False, nothing, nothing)
    worker._ask_for(group, nothing)
    assert [call.args[0] for call in task.submit.call_args_list] == [(0, 0), (0, 1)]
    for index, decided in ((1, 0), (0, 1)):
        task.poll.return_value = [((0, index), RewardResult(1.0))]
        worker._take_rewards(0.0)
        assert buffer.decide.call_count == decided
    assert [rollout.reward for rollout in group.rollouts()] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_a_served_teacher_that_dies_is_started_again(
    run: Run, whole: Whole, schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("train.schedule=overlap", "rollout.uncorrected=true") if schedule == "overlap" else ()
    folder, rows = whole("server", *TEPO)
    calls, revived = count(1), []
    score, revive = ReferenceSampler.score, ReferenceSampler.revive

    def fail_once(sampler: ReferenceSampler, *args: Any) -> Scores:
        if next(calls) == 10:  # of 16: in the second step
            raise ServerDied("planted")
        return score(sampler, *args)

    monkeypatch.setattr(ReferenceSampler, "score", fail_once)

    def note(sampler: ReferenceSampler) -> bool:
        revived.append(sampler)
        return revive(sampler)

    monkeypatch.setattr(ReferenceSampler, "revive", note)
    restarts = lambda sampler: {**NO_SERVERS, "servers/restarts": float(revived.count(sampler))}  # noqa: E731
    monkeypatch.setattr(ReferenceSampler, "figures", restarts)
    again = run("again", "server", *TEPO, *options)
    assert len(revived) == again[-1]["servers/restarts"] == 1
    judged = [
        rollout.teacher_logprobs for step in (0, 1) for rollout in Record.read(tmp_path / "again" / "rollouts", step).rollouts
    ]
    assert len(judged) == 16
    assert all(values is not None for values in judged)
    if schedule == "sync":  # ahead of training the order depends on time
        assert learnt(again) == learnt(rows)
        assert weights(tmp_path / "again") == weights(folder)


@pytest.mark.slow
def test_a_run_with_a_teacher_on_the_ranks_is_resumed_with_the_same_bits(run: Run, whole: Whole, tmp_path: Path) -> None:
    run("resumed", "ranks", *TEPO, steps=1)
    run("resumed", "ranks", *TEPO, "train.resume=true")
    assert weights(tmp_path / "resumed") == weights(whole("ranks", *TEPO)[0])


@pytest.mark.slow
def test_each_source_has_its_own_teacher(teacher: Path, few_problems: Path, tmp_path: Path) -> None:
    """One served, one on the ranks: each response is judged once."""
    sources = ", ".join(f"{{path: '{few_problems}', name: {name}, teacher: {name}}}" for name in ("a", "b"))
    settings = [f"data.train=[{sources}]", "data.heldout=null", f"teachers.a={{path: {teacher}, place: server}}"]
    rows = train_on_references(
        TINY, tmp_path / "out", *SMALL, *settings, "teachers.b.path=builtin:tiny", *TEPO, "train.steps=2"
    )
    judged = [rollout.teacher_logprobs for rollout in Record.read(tmp_path / "out" / "rollouts", 1).rollouts]
    assert sum(values is None for values in judged) == sum(values is not None for values in judged) == len(judged) // 2
    assert all(np.isfinite(values).all() for values in judged if values is not None)
    assert rows[-1]["distill/divergence"] > 0


@pytest.mark.slow
def test_a_generation_step_of_ones_own_may_reward_what_a_teacher_judges(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def draw(problems, sampler):\n"
        "    return [rollout for group in sampler.sample(problems) for rollout in sampler.reward(group)]\n"
    )
    run("own", "server", *TEPO, f"rollout.collect={tmp_path / 'own.py'}:draw", steps=1)
    assert all(rollout.teacher_logprobs is not None for rollout in Record.read(tmp_path / "own" / "rollouts", 0).rollouts)


@pytest.mark.parametrize(("place", "room", "allowed"), [("server", 14, 13), ("ranks", 13, 13)])
def test_a_teacher_that_is_too_short_is_refused(
    run: Run, teacher: Path, tmp_path: Path, place: str, room: int, allowed: int
) -> None:
    """By the positions of its own model, or by those that its server is given."""
    short = tmp_path / "model"
    shutil.copytree(teacher, short)
    settings = json.loads((short / "config.json").read_text())
    if place == "ranks":
        (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": room}))
    server = (f"teachers.big.server={{max_model_len: {room}}}",) if place == "server" else ()
    message = rf"teachers\.big takes {room} tokens, and scores responses of at most {allowed}, .* may have 14: lower"
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"prompt": "1+" * 20 + "1=", "answer": "21"}))  # it scores no answer
    heldout = (f"data.heldout={tmp_path}/heldout.jsonl", "evaluate.every=1")
    with pytest.raises(ValueError, match=message):
        run("short", place, *TEPO, f"teachers.big.path={short}", *server, *heldout)


def test_a_replay_of_other_problems_with_several_teachers_is_a_sentence(whole: Whole, teacher: Path, tmp_path: Path) -> None:
    recorded, _ = whole("server", *TEPO)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    sources = f"[{{path: {tmp_path}/a.jsonl, name: x, teacher: a}}, {{path: {tmp_path}/a.jsonl, name: y, teacher: b}}]"
    settings = [f"data.train={sources}", "data.heldout=null", f"teachers={{a: {{path: {teacher}}}, b: {{path: {teacher}}}}}"]
    replay = [f"rollout.replay={recorded / 'rollouts'}", "rollout.record=false", "train.steps=1"]
    with pytest.raises(ValueError, match=r"the problem '.*' of rollout\.replay is not in data\.train, whose sources name the"):
        train_on_references(TINY, tmp_path / "out", *SMALL, *settings, *TEPO, *replay)


def test_a_teacher_with_another_vocabulary_is_refused(teacher: Path, tmp_path: Path) -> None:
    """Also one of equal size in another order."""
    import sentencepiece.sentencepiece_model_pb2 as model_pb2

    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    model = model_pb2.ModelProto.FromString((other / "tokenizer.model").read_bytes())
    pieces = model.pieces
    pieces[10].piece, pieces[11].piece = pieces[11].piece, pieces[10].piece
    (other / "tokenizer.model").write_bytes(model.SerializeToString())
    config = load_run(TINY, [f"teachers.big.path={other}", "objective.distill.of=all", f"output={tmp_path / 'out'}"])
    with pytest.raises(
        ValueError, match=r"teachers\.big: token 10 is .* in the vocabulary of .*/other and .* in that of builtin:tiny"
    ):
        checks.check_model(config)
    with pytest.raises(ValueError, match=r"teachers\.big is split as the policy is: .*tp = 8.*place = server"):
        checks.check_model(load_run(TINY, [f"teachers.big.path={teacher}", "engine.parallel.tp=8", "objective.distill.of=all"]))
    served = ["objective.distill.of=top_k", f"teachers.big={{path: {teacher}, place: server, server: {{tp: 3}}}}"]
    with pytest.raises(ValueError, match=r"teachers\.big: teachers\.big\.server\.tp = 3 does not fit this model: "):
        checks.check_model(load_run(TINY, [*served, f"output={tmp_path / 'out'}"]))
