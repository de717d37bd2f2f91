"""Sampling whose tokens the trainer could not score, or whose strings would not be found, is refused with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tepo_megatron.config.loading.load import load_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text("name: x\n")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout.sampling.top_p=0.9"], r"sampling\.top_p = 0\.9 without sampling\.top_k: .* set sampling\.top_k = 100"),
        (["rollout.sampling.min_p=0.1"], r"sampling\.min_p = 0\.1 without sampling\.top_k"),
        (["rollout.sampling.bad_words=[idiot]"], r"sampling\.bad_words without sampling\.top_k"),
        (["rollout.sampling.top_k=1025"], r"sampling\.top_k = 1025: .* at most 1024 of them"),
        (["rollout.sampling.top_k=8", "rollout.server.speculative={}"], r"sampling\.top_k = 8 with server\.speculative"),
        (
            ["rollout.partial=true", "rollout.oversample=1.5", "rollout.sampling.stop=[x]"],
            r"partial = true with sampling\.stop",
        ),
        (["rollout.sampling.stop=['']"], r"one of the strings is empty"),
        (["rollout.sampling.top_p=0"], r"rollout\.sampling\.top_p"),
        (["rollout.sampling.min_p=1"], r"rollout\.sampling\.min_p"),
    ],
)
def test_what_cannot_be_scored_or_found_is_refused(overrides: list[str], sentence: str, run_file: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_run(run_file, overrides)


def test_what_can_is_taken(run_file: Path) -> None:
    given = ["rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20", "rollout.sampling.min_p=0.01"]
    assert load_run(run_file, given).rollout.sampling.truncates
    stops = load_run(run_file, ["rollout.sampling.stop=['Question:']"])
    assert stops.servers_need_tokenizer
    assert not stops.rollout.sampling.truncates
    plain = load_run(run_file, [])
    assert not plain.servers_need_tokenizer
    assert not plain.rollout.sampling.truncates
