"""``tepo init``: a file that a run can begin with, out of what a new user has."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file, save_file

from tepo_megatron.cli import doctor
from tepo_megatron.cli.doctor import run_checks
from tepo_megatron.cli.machine_checks import diagnose, is_fit
from tepo_megatron.config.load import load_run
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.cli import invoke
from tests.support.data_files import write_csv, write_jsonl, write_parquet
from tests.support.random_models import write_llama

INIT = ("--model", "model", "--train", "train.jsonl", "--verifier", "exact", "--gpus", "0")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and problems, as a user has them."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_model_path("builtin:tiny"), tmp_path / "model")
    for name, first in (("train", 10), ("heldout", 50)):
        write_jsonl(Path(f"{name}.jsonl"), [{"prompt": f"{at}+1=", "answer": at + 1} for at in range(first, first + 5)])
    return tmp_path


def test_answers_become_a_run_that_the_doctor_finds_fit(own: Path) -> None:
    """What cannot be used is said, and asked again."""
    answers = ["nowhere", "model", "train.jsonl", "heldout.jsonl", "last_wrod", "last_word", "none", "0"]
    done = invoke("init", input="\n".join(answers) + "\n")
    for said in ("the model folder nowhere does not exist", "last_wrod", "'none' is no number of 0 or more"):
        assert said in done.stderr
    assert "5 problems; the first: '10+1=', answer '11'" in done.stdout
    assert "wrote run.yaml; next: tepo doctor --run run.yaml, then tepo train run.yaml" in done.stdout
    config = load_run(own / "run.yaml")
    assert (config.model.path, config.data.train, config.data.heldout) == ("model", "train.jsonl", "heldout.jsonl")
    assert (config.reward.verifier, config.engine.platform, config.output) == ("last_word", "cpu", Path("out/model"))
    assert config.rollout.server.max_model_len == 256  # what the model takes
    checks = diagnose(run_checks(config))
    assert is_fit(checks), checks
    (check,) = [check for check in checks if check.name == "model and data"]
    passes = config.train.steps * config.rollout.prompts_per_step / 5
    assert check.detail == f"model; 5 problems to train on, {passes:.1f} times in {config.train.steps} steps; 5 held out"
    assert "run.yaml is there already" in invoke("init", code=1).stderr


def test_options_are_not_asked_and_without_held_out_problems_nothing_is_evaluated(own: Path) -> None:
    invoke("init", "new/mine.yaml", *INIT)
    for named, called in (("model/.", "model"), ("builtin:tiny", "tiny")):
        invoke("init", "x.yaml", "--overwrite", "--model", named, *INIT[2:])
        assert load_run(own / "x.yaml").output == Path("out") / called
    config = load_run(own / "new" / "mine.yaml")
    assert (config.data.heldout, config.evaluate.every) == (None, 0)
    assert config.rollout.server.max_model_len == config.rollout.sampling.max_new_tokens + 6  # 10+1= and what begins a text


@pytest.fixture
def chatty(own: Path) -> Path:
    """The model with a tokenizer that has a chat template."""
    folder = own / "chatty"
    shutil.copytree(own / "model", folder, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    tokenizer = load_tokenizer(write_chat_tokenizer(folder))
    settings = json.loads((folder / "config.json").read_text())
    fitting = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_ids[0]}
    (folder / "config.json").write_text(json.dumps({**settings, **fitting}))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].new_zeros(tokenizer.vocab_size, tensors[name].shape[1])
    save_file(tensors, folder / "model.safetensors")
    return own


def test_columns_and_the_chat_template_are_asked_and_shown(chatty: Path) -> None:
    """A CSV file whose columns have other names; the answers that cannot be used are said, and asked again."""
    for name, first in (("train", 10), ("test", 50)):
        write_csv(chatty / f"{name}.csv", [{"task": f"{at}+1", "solution": at + 1} for at in range(first, first + 5)])
    answers = ["chatty", "train.csv", "tusk", "task", "solution", "train.csv", "test.csv", "maybe", "", "last_word"]
    done = invoke("init", input="\n".join([*answers, "0"]) + "\n")
    assert "'tusk' is no column of train.csv; task, solution" in done.stderr
    assert "train.csv is trained on; give other" in done.stderr
    assert "'maybe' is no answer" in done.stderr
    assert "the model reads: ⟦" in done.stdout
    config = load_run(chatty / "run.yaml")
    assert (config.data.train, config.data.heldout, config.data.chat_template) == ("train.csv", "test.csv", True)
    assert (config.data.fields.prompt, config.data.fields.answer) == ("task", "solution")
    words = ["--model", "chatty", "--train", "train.csv", "--prompt-column", "task", "--answer-column", "solution"]
    words += ["--verifier", "exact", "--gpus", "0", "--no-chat-template", "--overwrite", "--heldout", "train.csv"]
    assert "train.csv is trained on" in invoke("init", *words, code=1).stderr
    invoke("init", *words[:-2])
    assert not load_run(chatty / "run.yaml").data.chat_template


@pytest.mark.parametrize(
    ("row", "fields"),
    [({"prompt": "9+1", "answer": 10}, ("prompt", "answer")), ({"sum": "9+1", "solution": 10}, ("sum", "solution"))],
)
def test_heldout_problems_have_columns_of_their_own(own: Path, row: dict[str, object], fields: tuple[str, str]) -> None:
    write_csv(own / "train.csv", [{"task": "1+1", "solution": 2}])
    write_csv(own / "test.csv", [row])
    words = ["--model", "model", "--train", "train.csv", "--prompt-column", "task", "--answer-column", "solution"]
    words += ["--heldout", "test.csv", "--verifier", "exact", "--gpus", "0"]
    if "sum" in row:
        refused = invoke("init", *words, code=1).stderr
        assert "--heldout-prompt-column is not given" in refused
        words += ["--heldout-prompt-column", "sum"]
    invoke("init", *words)
    data = load_run(own / "run.yaml").data
    (source,) = data.heldout_sources
    assert (source.columns.prompt, source.columns.answer) == fields
    assert (data.fields.prompt, data.fields.answer) == ("task", "solution")


def test_a_folder_with_splits_is_asked_which_and_its_test_split_is_proposed(own: Path) -> None:
    rows = [{"question": f"{at}+1=", "answer": f"{at + 1}"} for at in range(10, 30)]
    for split, some in (("train", rows[:10]), ("test", rows[9:])):
        write_parquet(own / "sums" / "data" / f"{split}-00000-of-00001.parquet", some)
    answers = ["model", "sums", "dev", "train", "question", "", "", "exact", "0"]
    done = invoke("init", input="\n".join(answers) + "\n")
    assert "'dev' is no split of sums; test, train" in done.stderr
    assert "warning: 1 of their prompts are trained on, too" in done.stderr
    config = load_run(own / "run.yaml")
    (training,), (heldout,) = config.data.train_sources, config.data.heldout_sources
    assert (training.path, training.split, heldout.path, heldout.split) == ("sums", "train", "sums", "test")
    (check,) = diagnose({"model and data": run_checks(config)["model and data"]})
    assert (check.status, "1 of the held-out prompts are trained on, too" in check.advice) == ("warn", True)
    config = load_run(
        own / "run.yaml", ["data.heldout=null", "evaluate.every=5", f"evaluate.sets.again.path={own / 'again.jsonl'}"]
    )
    (own / "again.jsonl").write_text('{"question": "10+1=", "answer": "11"}\n{"question": "11+2=", "answer": "13"}\n')
    (check,) = diagnose({"model and data": run_checks(config)["model and data"]})
    assert (check.status, check.advice[:47]) == ("warn", "1 of the prompts of again are trained on, too: ")
    words = ["--model", "model", "--train", "sums", "--prompt-column", "question", "--verifier", "exact", "--gpus", "0"]
    refused = invoke("init", *words, "--split", "train", "--heldout-split", "train", "--overwrite", code=1)
    assert "the split train of sums is trained on" in refused.stderr


def test_a_verifier_that_refuses_the_answers_themselves_is_said(own: Path) -> None:
    (own / "words.jsonl").write_text('{"prompt": "1+1=", "answer": "is 2"}\n')
    (own / "mixed.jsonl").write_text('{"prompt": "1+1=", "answer": "is 2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    for name, code, said in (
        ("words", 1, "the verifier last_word can give no response a reward"),
        ("mixed", 0, "warning: last_word refuses the answers of 1 problems themselves"),
    ):
        words = ["--model", "model", "--train", f"{name}.jsonl", "--verifier", "last_word", "--gpus", "0"]
        assert said in invoke("init", *words, code=code).stderr


def test_a_verifier_is_tried(own: Path) -> None:
    (own / "mine.py").write_text(
        "def none(problem, response):\n    pass\n\nclass Empty:\n    pass\n\n"
        "def parts(problem, response):\n    return {'right': 1.0, 'short': 0.5}\n\n"
        "class Made:\n    def __init__(self, url):\n        pass\n"
    )
    words = [*INIT[:4], "--heldout", "heldout.jsonl", "--gpus", "0", "--verifier"]
    arguments = "give exact, and write it and its reward.kwargs into the file"
    for name, said in (("none", "cannot score the first"), ("Empty", "neither a method score"), ("Made", arguments)):
        assert said in invoke("init", *words, f"mine.py:{name}", code=1).stderr
        assert not (own / "run.yaml").exists()
    assert (
        "set evaluate.correct to the component that says what is correct: right, short"
        in invoke("init", *words, "mine.py:parts").stderr
    )


def test_the_doctor_takes_settings_over_a_file_and_without_one(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {})  # of the machine
    settings = ["model.path=model", "data.train=train.jsonl", "data.heldout=heldout.jsonl"]
    done = invoke("doctor", "--json", *settings, "rollout.sampling.max_new_tokens=9", "train.steps=7")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    passes = 7 * load_run(None).rollout.prompts_per_step / 5
    assert found["model and data"]["detail"].endswith(f"5 problems to train on, {passes:.1f} times in 7 steps; 5 held out")
    invoke("init", *INIT)
    done = invoke("doctor", "--json", "--run", "run.yaml", "reward.verifier=last_wrod", code=1)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert "did you mean last_word?" in found["verifier"]["advice"]


def test_an_interrupt_is_no_answer(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise typer.Abort from None  # as of an input that has ended

    monkeypatch.setattr(typer, "prompt", interrupted)
    invoke("init", *INIT, code=130)
    assert not (own / "run.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (INIT[:2], "--train is not given, and nobody answers"),
        ((*INIT[:4], "--verifier", "judge"), "judge needs reward.kwargs"),
        ((*INIT[:4], "--verifier", "python_tests"), "python_tests needs reward.run_code = true"),
        ((*INIT, "--nodes", "4"), "--nodes 4 is for GPUs"),
        (("--model", "model", "--train", "builtin:addition", "--heldout", "heldout.jsonl", *INIT[4:]), "one is your own"),
    ],
)
def test_what_would_be_no_run_is_refused(words: tuple[str, ...], said: str, own: Path) -> None:
    assert said in invoke("init", *words, code=1).stderr
    assert not (own / "run.yaml").exists()


def test_a_model_that_no_server_of_this_machine_takes_is_refused(own: Path) -> None:
    write_llama(own / "model", head_dim=24, vocab_size=64)  # the tokenizer stays
    assert "24 dimensions" in invoke("init", *INIT, code=1).stderr


def test_what_was_named_is_found_from_a_linked_folder_also_if_it_looks_like_a_reference(own: Path) -> None:
    (own / "far" / "away").mkdir(parents=True)
    Path("link").symlink_to("far/away")
    name = shutil.copy("train.jsonl", "a\\${b}.jsonl")
    invoke("init", "link/run.yaml", *INIT[:3], name, *INIT[4:])
    config = load_run("link/run.yaml")
    assert (config.model.path, config.data.train) == ("model", name)


@pytest.mark.parametrize(("gpus", "nodes", "layout"), [(1, 1, (1, 1, 1)), (8, 1, (1, 4, 4)), (2, 2, (1, 2, 2))])
def test_gpus_are_shared_out_so_that_the_plan_fits(gpus: int, nodes: int, layout: tuple[int, int, int], own: Path) -> None:
    invoke("init", *INIT[:-1], gpus, "--nodes", nodes)
    config = load_run(own / "run.yaml")
    parallel = config.engine.parallel
    assert (parallel.tp, parallel.dp, config.rollout.server.count) == layout
    assert (config.rollout.server.placement == "colocated") == (gpus == 1)
    assert (config.cluster.train_nodes, config.cluster.rollout_nodes) == ((1, 0) if nodes == 1 else (1, 1))
    invoke("plan", "run.yaml")
