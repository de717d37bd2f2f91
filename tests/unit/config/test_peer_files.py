"""Files of TRL, verl and NeMo-RL, as they are read."""

from pathlib import Path

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.config.peer_files import read_peer_file
from tepo_megatron.config.peers import convert
from tests.support.cli import invoke


def test_a_file_that_names_its_parents_has_their_settings(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("grpo: {max_num_steps: 7, num_prompts_per_step: 4}")
    (tmp_path / "parent.yaml").write_text("{defaults: old.yaml, grpo: {num_prompts_per_step: 8}}")
    child = tmp_path / "child.yaml"
    child.write_text("{defaults: [parent.yaml], policy: {train_global_batch_size: 128}}")
    made, left = convert("nemo-rl", read_peer_file("nemo-rl", child))
    assert (made["train.steps"], made["rollout.prompts_per_step"], made["train.minibatches"]) == (7, 8, 1)
    assert not any("defaults" in sentence for sentence in left)
    child.write_text("{defaults: parent.yaml, grpo: {_override_: true, num_prompts_per_step: 64}}")
    made, left = convert("nemo-rl", read_peer_file("nemo-rl", child))
    assert (made["rollout.prompts_per_step"], "train.steps" in made) == (64, False)
    assert not any("override" in sentence for sentence in left)
    child.write_text("{defaults: parent.yaml, grpo: [1]}")
    with pytest.raises(ValueError, match=r"child\.yaml and the files of its defaults do not fit together"):
        read_peer_file("nemo-rl", child)
    child.write_text("{defaults: gone.yaml, policy: {train_global_batch_size: 512}}")
    assert any("its files are not beside this one" in text for text in convert("nemo-rl", read_peer_file("nemo-rl", child))[1])
    for content, said in (("{defaults: child.yaml}", "its own parent"), ("{defaults: list.yaml}", "has no settings")):
        child.write_text(content)
        (tmp_path / "list.yaml").write_text("- 1")
        with pytest.raises(ValueError, match=said):
            read_peer_file("nemo-rl", child)
    for path, said in ((tmp_path / "gone.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=f"{path} cannot be read: {said}"):
            read_peer_file("trl", path)


def test_a_text_of_another_trainer_is_the_same_here(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("output_dir: out/🙂\n")
    (tmp_path / "run.yaml").write_text(invoke("config", "from-trl", tmp_path / "grpo.yaml").stdout)
    assert load_run(tmp_path / "run.yaml").output == tmp_path / "out/🙂"


def test_a_text_of_another_trainer_sets_nothing_else(tmp_path: Path) -> None:
    name, key = r"x\ncluster: {setup: [touch evil]}\n#", r"a\nseed: 7\n#"
    (tmp_path / "grpo.yaml").write_text(f'{{reward_funcs: [accuracy_reward, "{name}"], "{key}": 1}}')
    (tmp_path / "run.yaml").write_text(invoke("config", "from-trl", tmp_path / "grpo.yaml").stdout)
    config, usual = load_run(tmp_path / "run.yaml"), load_run(None)
    assert (config.cluster.setup, config.seed) == (usual.cluster.setup, usual.seed)
