"""``tepo data show``: prompts as the model reads them, counts, and what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.data_files import write_jsonl, write_parquet

runner = CliRunner()


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A model with a chat template, and two sources: messages, and Parquet with a template of its own."""
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model"))
    (model / "tokenizer.model").unlink()
    write_chat_tokenizer(model)
    talk = [{"messages": [{"role": "user", "content": text}], "answer": "2"} for text in ("the sum", "<|end|>", "the sum")]
    one = write_jsonl(tmp_path / "talk.jsonl", talk)
    two = write_parquet(tmp_path / "sums.parquet", [{"q": "1+1", "answer": 2}, {"q": "1" * 99, "answer": 3}])
    sources = f"[{{path: {one}, weight: 3}}, {{path: {two}, name: sums, template: '{{q}}=', fields: {{prompt: q}}}}]"
    return [f"model.path={model}", f"data.train={sources}", "data.filter=[unique]", "data.max_prompt_tokens=60"]


def show(*words: str) -> str:
    done = runner.invoke(app, ["data", "show", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_prompts_counts_and_what_is_left_out(settings: list[str]) -> None:
    shown = json.loads(show(*settings, "--json"))
    talk, sums = shown["sources"]
    assert (talk["source"], talk["share"], talk["problems"], talk["used"]) == ("talk", 0.75, 3, 2)
    assert talk["left_out"] == {"refused by the filter unique": 1}
    assert (sums["source"], sums["used"], sums["tokens"]["max"]) == ("sums", 1, 4)
    assert sums["left_out"] == {"longer than data.max_prompt_tokens": 1}
    assert [(row["id"], row["prompt"], row["tokens"], row["answer"]) for row in shown["prompts"]] == [
        ("talk:1", "⟦<|user|>⟧the sum⟦<|end|>⟧⟦<|assistant|>⟧", 5, "2"),
        ("talk:2", "⟦<|user|>⟧<|end|>⟦<|end|>⟧⟦<|assistant|>⟧", shown["prompts"][1]["tokens"], "2"),
        ("sums:1", "1+1=", 4, "2"),
    ]
    left = json.loads(show(*settings, "--left-out", "--source", "sums", "--json"))
    assert [(row["id"], row["tokens"], row["left_out"]) for row in left["prompts"]] == [
        ("sums:2", 100, "longer than data.max_prompt_tokens")
    ]
    text = show(*settings, "--limit", "1")
    assert "talk:1: 5 tokens, answer '2'\n  ⟦<|user|>⟧the sum⟦<|end|>⟧⟦<|assistant|>⟧\n" in text
    assert "talk.jsonl: 1 problem left out, refused by the filter unique\n" in text


def test_what_is_not_there(settings: list[str]) -> None:
    for more, message in (
        (["--source", "other"], "there is no source other; the run has talk, sums"),
        (["--heldout"], "there are no held-out problems to show"),
    ):
        done = runner.invoke(app, ["data", "show", *settings, *more])
        assert done.exit_code == 1
        assert message in done.stderr
