"""Inputs that cannot be used are refused before anything starts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.core.rollout import Rollout, SamplingMask, WeightsVersion, token_ids
from tepo_megatron.run.checks import RUN_CHECKS, RunSubject, check_model
from tepo_megatron.run.sampling.inputs import Inputs, read_replay
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.sampler.rollout_file import record_path, write_rollouts
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.weights.architecture import ModelSpec
from tests.support.checkpoints import make_whole
from tests.support.random_models import write_llama

STEPS, SHORT = 3, "rollout.sampling.max_new_tokens=16"


@pytest.fixture
def make(few_problems: Path) -> Callable[..., RunConfig]:
    """Makes runs with few problems, changed by overrides."""
    data = (f"data.train={few_problems}", "data.heldout=null", "evaluate.every=0")
    return lambda *overrides: load_run(None, [*data, SHORT, *overrides])


@pytest.fixture
def replaying(make: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes runs that replay what is in ``recorded``."""
    for step in range(STEPS):
        write_rollouts(tmp_path / "recorded", step, rollouts(step))
    size = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", f"train.steps={STEPS}", "train.minibatches=2")
    return partial(make, *size, f"rollout.replay={tmp_path}/recorded", f"output={tmp_path}/out")


def rollouts(step: int) -> list[Rollout]:
    version = WeightsVersion(step, "ab")
    return [Rollout(f"p{at // 2}", at // 2, (3, at // 2), (4, 5), (-0.5, -0.5), "stop", version) for at in range(4)]


def read(config: RunConfig) -> int:
    return Inputs.read(config, resolve_model_path(config.model.path)).spec.vocab_size


def test_a_record_without_fitting_routes_is_named_with_its_line(replaying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8}
    spec = ModelSpec.of({**mixtral, "intermediate_size": 8, "vocab_size": 61, "num_local_experts": 4}, "test")
    monkeypatch.setattr("tepo_megatron.run.sampling.inputs.read_model_spec", lambda folder: spec)
    fitting = [replace(each, routed_experts=np.zeros((3, 3, 2), np.uint8)) for each in rollouts(0)]
    other = replace(fitting[1], routed_experts=np.zeros((3, 5, 2), np.uint8))
    plain, routed = replaying(), replaying("rollout.server.routing_replay=true")
    for recorded, problem in (
        (rollouts(0), "line 2: the rollout has no routing record"),
        ([fitting[0], other, *fitting[2:]], "line 3: the rollout has a routing record of 3 × 5 × 2"),
    ):
        write_rollouts(plain.rollout.replay, 0, recorded)
        with pytest.raises(ValueError, match=rf"step_0000000\.jsonl, {problem}"):
            read(routed)
    read(plain)  # what is not replayed is not asked for
    write_rollouts(plain.rollout.replay, 0, fitting)
    read(routed)


def test_a_record_without_the_tokens_that_could_be_drawn_is_named_with_its_line(replaying: Any) -> None:
    plain, truncating = replaying(), replaying("rollout.sampling.top_k=20")
    known = [replace(each, sampling_mask=SamplingMask([1, 0], [7])) for each in rollouts(0)]
    known[3] = Rollout("p1", 1, (3, 1), (), (), "stop", WeightsVersion(0, "ab"), reward=None)  # a failed episode
    write_rollouts(plain.rollout.replay, 0, known)
    read(truncating)
    write_rollouts(plain.rollout.replay, 0, [known[0], *rollouts(0)[1:]])
    read(plain)  # scored among all tokens
    with pytest.raises(ValueError, match=r"step_0000000\.jsonl, line 3: the rollout has no sampling mask, but .*top_k says"):
        read(truncating)


def test_records_that_are_missing_or_of_other_weights_are_named_before_the_run(replaying: Any) -> None:
    config = replaying()
    vocab_size, replay = read(config), config.rollout.replay
    assert [read_replay(config, vocab_size, step) for step in range(STEPS)] == [rollouts(step) for step in range(STEPS)]
    write_rollouts(replay, 0, rollouts(1))
    with pytest.raises(ValueError, match=r"step_0000000\.jsonl, line 2: drawn by the weights of step 1, not of step 0"):
        read(config)
    record_path(replay, 0).unlink()
    with pytest.raises(ValueError, match=r"no record of step 0 \(step_0000000\.jsonl\), and 1 of the steps 0 to 2 are missing"):
        read(config)
    read(replaying("train.resume=true", "train.resume_from=/other/step_000001"))  # a resumed run begins with a later one
    make_whole(config.output / "checkpoints", 2)
    config = replaying("train.resume=true")
    read(config)
    with pytest.raises(ValueError, match=r"no record of step 0 .*, and 1 of the steps 0 to 2 are missing"):
        read(replaying("train.resume=true", "train.resume_from=step_000000"))
    write_rollouts(replay, 2, rollouts(0))
    with pytest.raises(ValueError, match=r"step_0000002\.jsonl, line 2: drawn by the weights of step 0"):
        read(config)
    first, *others = rollouts(1)
    write_rollouts(replay, 1, [replace(first, response_ids=token_ids((4, vocab_size))), *others])
    with pytest.raises(ValueError, match=rf"step_0000001\.jsonl, line 2: token {vocab_size} is not one of the model's"):
        read_replay(config, vocab_size, 1)


@pytest.mark.parametrize(
    ("changes", "tied", "message"),
    [
        ({"lm_head.weight": None}, False, r"missing: lm_head.weight \(a reward or embedding model has none; give a model with"),
        ({"lm_head.bias": torch.zeros(61)}, False, r"unexpected: lm_head.bias"),
        ({}, False, None),
        ({}, True, None),
    ],
    ids=["none", "with a bias", "its own", "tied"],
)
@pytest.mark.parametrize("head", ["logits", "fused"])
def test_a_head_that_cannot_be_loaded_is_refused_before_servers_start(
    changes: dict[str, torch.Tensor | None], tied: bool, message: str | None, head: str, tmp_path: Path
) -> None:
    write_llama(tmp_path, tie_word_embeddings=tied)
    shutil.copy(resolve_model_path("builtin:tiny") / "tokenizer.model", tmp_path)
    tensors = {**load_file(tmp_path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    servers = {"server": {"placement": "external", "registry": str(tmp_path)}}  # heads too small for a server here
    document = {"model": {"path": str(tmp_path)}, "output": str(tmp_path / "out"), "rollout": servers}
    config = RunConfig.model_validate({**document, "engine": {"head": head}})
    if message is None:
        assert check_model(config) == tmp_path
    else:
        with pytest.raises(ValueError, match=message):
            check_model(config)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (5000, r"exceed the 256 tokens that the model takes; lower max_new_tokens to 248 or less$"),
        (253, r"the model takes; lower max_new_tokens to 248 or less, or set data.max_prompt_tokens=3$"),
    ],
)
def test_a_response_that_leaves_no_room_for_its_prompt_is_refused(new: int, message: str, make: Any) -> None:
    with pytest.raises(ValueError, match=message):
        read(make(f"rollout.sampling.max_new_tokens={new}"))


def test_the_tokenizer_is_compared_with_vllms_where_vllm_looks_for_strings(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Tokenizer, "check_served", lambda _self, texts, words: seen.extend([*texts, *words]))
    read(make())
    assert not seen
    read(make('rollout.sampling.stop=["\\n"]'))
    assert seen
    seen.clear()
    read(make('rollout.sampling.bad_words=["never"]', "rollout.sampling.top_k=5"))
    assert seen[0].endswith("=")
    assert seen[1].isdecimal()
    assert seen[-1] == "never"


def test_variables_of_the_chat_template_that_cannot_act_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make("data.chat_template_kwargs={thinks: false}")
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs: thinks is no variable of .*'s chat template"):
        read(config)
    monkeypatch.setattr("tepo_megatron.run.sampling.inputs.load_tokenizer", lambda folder, _: load_tokenizer(folder))
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs does nothing for plain prompts; set data\.chat_template"):
        read(config)


def test_answers_that_the_verifier_refuses_itself_end_the_start(tmp_path: Path) -> None:
    """All of a source: a sentence; some: a notice. A source's own verifier counts, and a replay asks for none."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "is 2"}\n{"prompt": "2+1=", "answer": "3"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "1+1=", "answer": "is 2"}\n')

    def inputs(verifier: str) -> list[str]:
        sources = [{"path": f"{tmp_path}/a.jsonl"}, {"path": f"{tmp_path}/b.jsonl", "verifier": verifier}]
        config = load_run(None, [f"data.train={json.dumps(sources)}", "data.heldout=null", "evaluate.every=0", SHORT])
        return Inputs.read(config, resolve_model_path(config.model.path)).left_out

    with pytest.raises(ValueError, match=r"the verifier last_word can give no response a reward: .*'is 2' of problem 'b:1'"):
        inputs("last_word")
    (notice,) = inputs("exact")
    assert notice == f"{tmp_path}/a.jsonl: 1 problems whose own answer last_word refuses: no response solves them"


def test_heads_that_vllm_has_no_attention_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"num_attention_heads": 8, "head_dim": 16}))
    (check,) = [check for check in RUN_CHECKS if check.name == "server machine"]
    run = RunSubject(load_run(None, [f"model.path={model}", "data.train=builtin:addition", SHORT]), this_machine())
    with pytest.raises(ValueError, match=r"attention heads have 16 dimensions .* on a CPU vLLM takes 32, 64, "):
        check.verify(run)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check.verify(run)
