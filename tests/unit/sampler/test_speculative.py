"""Speculative decoding: its settings, and what the plugin mends of it on CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tepo_megatron.config.rollout import ServerConfig, SpeculativeConfig
from tepo_megatron.sampler.vllm.plugin.patches import SPECULATES_VARIABLE, expand_batch_to_tokens
from tepo_megatron.sampler.vllm.server import Server


def test_the_settings_reach_vllm_under_its_names() -> None:
    def started(config: ServerConfig) -> tuple[list[str], dict[str, str]]:
        server = Server(config, model_dir=Path("m"), dtype="float32", cores="0", key="k", log=Path("log"))
        return server.command(on_gpu=False), server.environment(on_gpu=False)

    command, environment = started(ServerConfig(speculative=SpeculativeConfig(num_speculative_tokens=3)))
    given = json.loads(command[command.index("--speculative-config") + 1])
    assert given == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert environment[SPECULATES_VARIABLE] == "1"
    command, environment = started(ServerConfig())
    assert "--speculative-config" not in command
    assert SPECULATES_VARIABLE not in environment


def test_a_draft_model_reaches_vllm_if_it_is_one_of_the_policys_vocabulary(tmp_path: Path) -> None:
    policy, draft, other = (tmp_path / name for name in ("policy", "draft", "other"))
    for folder, size in ((policy, 64), (draft, 64), (other, 65)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))

    def server(model: Path, **config: Any) -> Server:
        made = ServerConfig(speculative=SpeculativeConfig(draft_model=model), **config)
        assert not made.starts_with_dummies(trained=True), "vLLM would fill the draft model with dummies, too"
        return Server(made, model_dir=policy, dtype="float32", cores="0|1", key="k", log=Path("log"))

    command = server(draft, tp=2).command(on_gpu=False)
    given = json.loads(command[command.index("--speculative-config") + 1])
    assert given == {
        "method": "draft_model", "model": str(draft), "draft_tensor_parallel_size": 2, "num_speculative_tokens": 4
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"other has a vocabulary of 65 tokens, and the model in .*policy one of 64"):
        server(other)
    with pytest.raises(ValueError, match=r"draft_model = .*nowhere is no folder with a model"):
        server(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            {"speculative": {"draft_model": "d", "prompt_lookup_max": 3}},
            "prompt_lookup_max is for n-grams",
        ),
        ({"speculative": {"draft_model": "d"}, "load_format": "dummy"}, "would fill the draft model with dummies too"),
        ({"speculative": {"draft_model": "d"}, "quantization": "fp8_per_channel"}, "has not been tested"),
    ],
)
def test_what_a_draft_model_cannot_be_combined_with_is_refused(server: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerConfig.model_validate(server)


def test_lengths_that_are_no_range_are_refused() -> None:
    with pytest.raises(ValidationError, match="prompt_lookup_min = 5 is above prompt_lookup_max = 4"):
        SpeculativeConfig(prompt_lookup_min=5)
    with pytest.raises(ValidationError, match="routing_replay = true with speculative"):
        ServerConfig(routing_replay=True, speculative=SpeculativeConfig())


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5, -1.0]), st.integers(0, 4)), min_size=1, max_size=6))
def test_each_value_is_there_as_often_as_its_request_has_tokens(requests: list[tuple[float, int]]) -> None:
    values, counts = zip(*requests, strict=True)
    ends = torch.tensor(counts).cumsum(0).int()
    found = expand_batch_to_tokens(torch.tensor(values), ends, sum(counts), replace_from=-1.0, replace_to=1)
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0 if value == -1 else value for value, count in requests for _ in range(count)]


def test_vllm_still_needs_it() -> None:
    """When this fails, vLLM expands temperatures on CPUs by itself: then ``plugin/speculative.py`` can go."""
    import vllm._custom_ops  # noqa: F401 # vLLM's operators for this machine
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((3,), torch.nan)
    _expand_kernel_impl(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    assert output.isnan().all()
