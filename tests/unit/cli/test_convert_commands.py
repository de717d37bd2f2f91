"""``tepo import`` and ``tepo export``, as a user meets them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tepo_megatron.cli.main import app
from tepo_megatron.config import RunConfig
from tepo_megatron.run.checks import check_model
from tepo_megatron.tasks.data.builtin import resolve_model_path

runner = CliRunner()


def test_there_and_back_again(tmp_path: Path) -> None:
    model, cut, whole = resolve_model_path("builtin:tiny"), tmp_path / "cut", tmp_path / "whole"
    done = runner.invoke(app, ["import", str(model), str(cut), "--tp", "2", "--pp", "2"])
    assert (done.exit_code, done.stdout) == (0, f"wrote {cut}\n")
    assert len(list((cut / "shards").iterdir())) == 4
    done = runner.invoke(app, ["export", str(cut), str(whole), "--dtype", "bfloat16"])
    assert (done.exit_code, done.stdout) == (0, f"wrote {whole}\n")
    found, expected = load_file(whole / "model.safetensors"), load_file(model / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    assert (whole / "tokenizer.model").read_bytes() == (model / "tokenizer.model").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "nowhere", "out"], "nowhere has no config.json"),
        (["import", "MODEL", "out", "--tp", "3"], "tp = 3 does not divide the model's 4 attention heads"),
        (["export", "nowhere", "out"], "nowhere is not a finished checkpoint; give a folder step_XXXXXX"),
        (["export", "MODEL", "MODEL"], "exists already; remove it, or give another folder"),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_1(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(resolve_model_path("builtin:tiny"))
    result = runner.invoke(app, [model if argument == "MODEL" else argument for argument in arguments])
    assert result.exit_code == 1
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_run_takes_only_shards_of_its_own_model(tmp_path: Path) -> None:
    model, cut = resolve_model_path("builtin:tiny"), tmp_path / "cut"
    assert runner.invoke(app, ["import", str(model), str(cut), "--tp", "2"]).exit_code == 0
    config = RunConfig.model_validate({"model": {"shards": str(cut)}})
    assert check_model(config) == model
    path = min((cut / "shards").iterdir())
    save_file({key: tensor + 1 if "q_proj" in key else tensor for key, tensor in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=r"was not imported from model\.path = .*: 4 of \d+ tensors differ"):
        check_model(config)
