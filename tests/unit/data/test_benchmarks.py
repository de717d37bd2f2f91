"""Published benchmarks become problems: small files of the same columns, written for these tests."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_megatron.config.load import load_run
from tepo_megatron.tasks.data.benchmarks import BENCHMARKS, LOCK, SETS, prepare
from tepo_megatron.tasks.data.rows import file_digest
from tests.support import code_rows
from tests.support.cli import invoke
from tests.support.data_files import write_jsonl, write_parquet

NOTHING = dict.fromkeys(("context", "error", "unit", "answer_type"))
SAMPLES: list[tuple[str, dict[str, Any], str]] = [
    ("math500/test/2.json", {"problem": "Halve 1.", "answer": "1/2", "subject": "Algebra", "unique_id": "test/2.json"}, "1/2"),
    ("aime24/61", {"id": 61, "problem": "Find 5 times 5.", "solution": "025", "answer": "025", "url": "https://y"}, "025"),
    ("aime25/0", {"problem": "Find 7 times 10.", "answer": "70", "id": "0"}, "70"),
    ("aime25/1", {"problem": "Find 4.", "answer": "4", "id": "1"}, "4"),
    ("amc23/0", {"id": 0, "question": "How many are 3 dozen?", "answer": 36.0, "url": "https://x"}, "36"),
    ("amc23/1", {"id": 1, "question": "What is minus one?", "answer": -1.0, "url": "https://y"}, "-1"),
    ("minerva/0", {"question": "A mass of 2 kg is at 3 m/s. Its momentum?", "answer": "6"}, "6"),
    ("minerva/1", {"question": "Speed of light, in m/s?", "answer": "3e8"}, "3e8"),
    ("olympiadbench/1606", {**NOTHING, "id": 1606, "question": "Solve $x^2=4$.", "final_answer": ["$2$", "$-2$"]}, "2, -2"),
    (
        "olympiadbench/1607",
        {"id": 1607, "question": "Find its area.", "final_answer": ["$1/4$"], "error": "1e-2", "unit": "m^2"}
        | {"context": "A square has side $\\frac{1}{2}$.", "answer_type": "Numerical"},
        "1/4",
    ),
    ("omni-math/0", {"domain": ["Algebra"], "problem": "Find all $n = n^2$.", "answer": "0, 1", "source": "own"}, "0, 1"),
    ("gsm8k/0", {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7 pens.\n#### 7"}, "7"),
    ("gsm8k/1", {"question": "A town of 1000 people triples. How many?", "answer": "1000*3\n#### 3,000"}, "3000"),
]
"""(Id, published row, answer); the prompt is the problem or question, after a context."""

FILES: dict[str, list[dict[str, Any]]] = dict(code_rows.FILES)
EXPECTED: dict[str, list[tuple[str, str, str]]] = dict(code_rows.EXPECTED)
for identity, row, answer in SAMPLES:
    prompt = "\n\n".join(filter(None, (row.get("context"), row.get("problem") or row["question"])))
    FILES.setdefault(identity.split("/")[0], []).append(row)
    EXPECTED.setdefault(identity.split("/")[0], []).append((identity, prompt, answer))


def write(name: str, folder: Path) -> Path:
    """A small file of a benchmark's columns, in its format and place."""
    path = folder / BENCHMARKS[name].file
    return Path((write_parquet if path.suffix == ".parquet" else write_jsonl)(path, FILES[name]))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a benchmark's file, which the registry then takes for the whole published one. Returns the folder."""

    def make(name: str) -> Path:
        path = write(name, tmp_path / "published" / name)
        changed: dict[str, Any] = {"problems": len(FILES[name]), "sha256": BENCHMARKS[name].sha256 and file_digest(path)}
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], **changed))
        return tmp_path / "published" / name

    return make


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_published_file_becomes_problems(name: str, small: Callable[[str], Path], tmp_path: Path) -> None:
    done = prepare(name, tmp_path / "out", source=small(name))
    found = [json.loads(line) for line in done.path.read_text().splitlines()]
    assert [(each["id"], each["prompt"], each["answer"]) for each in found] == EXPECTED[name]
    if name == "olympiadbench":  # what else is known of a problem
        assert (found[1]["unit"], found[1]["error"], found[1]["answer_type"]) == ("m^2", "1e-2", "Numerical")
    assert done.recorded == (BENCHMARKS[name].sha256 is None)
    given = yaml.safe_load((tmp_path / "out" / SETS).read_text())["evaluate"]["sets"][name]
    assert given["sha256"] == file_digest(done.path)
    assert ("```python" if BENCHMARKS[name].verifier == "python_tests" else "\\boxed{}") in given["template"]


@pytest.mark.parametrize("name", ["math500", "minerva"], ids=["known", "recorded at the first preparation"])
def test_a_changed_file_is_refused_by_its_digest(name: str, small: Callable[[str], Path], tmp_path: Path) -> None:
    folder, out = small(name), tmp_path / "out"
    prepare(name, out, source=folder)
    before = (out / f"{name}.jsonl").read_bytes(), (out / LOCK).read_bytes()
    path = folder / BENCHMARKS[name].file
    path.write_bytes(path.read_bytes() + b" \n")
    with pytest.raises(ValueError, match=r"has the SHA-256 .*another file, of which figures are not comparable"):
        prepare(name, out, source=folder)
    assert ((out / f"{name}.jsonl").read_bytes(), (out / LOCK).read_bytes()) == before
    prepare(name, out, source=folder, accept_changed=True)
    assert prepare(name, out, source=folder).source_sha256 == file_digest(path)


def test_part_of_a_file_is_refused(small: Callable[[str], Path], tmp_path: Path) -> None:
    folder = small("minerva")
    path = folder / BENCHMARKS["minerva"].file
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="has 1 problems, and Minerva Math has 2"):
        prepare("minerva", tmp_path / "out", source=folder)
    assert not (tmp_path / "out").exists()


def test_a_family_stays_what_it_was(small: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare("gsm8k", out, source=small("gsm8k"), family="base")
    prepare("aime24", out, source=small("aime24"))
    prepare("gsm8k", out, source=small("gsm8k"))
    sets = yaml.safe_load((out / SETS).read_text())["evaluate"]["sets"]
    assert list(sets) == ["aime24", "gsm8k"]
    assert sets["gsm8k"]["template"].startswith("Question: {prompt}")
    assert "chat_template" not in sets["gsm8k"]
    assert "0 to 999" in sets["aime24"]["template"]


def test_templates_are_of_families_and_known_benchmarks() -> None:
    text = files("tepo_megatron.tasks.data").joinpath("benchmarks.yaml").read_text()
    for family, entries in yaml.safe_load(text)["families"].items():
        assert set(entries) - {"about", "all", "code"} <= set(BENCHMARKS), family
        assert entries["about"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("omni-math", [{"problem": "?"}], "row 1 has no answer; its columns are problem"),
        ("omni-math", [{"problem": "?", "answer": None}], "row 1 has no answer, but null"),
        ("omni-math", [{"problem": " ", "answer": "1"}], "row 1 has no prompt"),
        ("aime25", FILES["aime25"][:1] * 2, "row 2 has the id '0', which another row has too"),
        ("mbpp", [{**FILES["mbpp"][0], "test_list": []}], "row 1 has no tests"),
    ],
)
def test_a_row_that_is_no_problem_is_named(name: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BENCHMARKS[name].convert(name, rows)


def test_what_cannot_be_found_or_fetched_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown benchmark 'math50'; .*did you mean math500\?"):
        prepare("math50", tmp_path)
    with pytest.raises(ValueError, match="unknown family 'lama'; known: plain, base, instruct"):
        prepare("math500", tmp_path, source=tmp_path, family="lama")
    with pytest.raises(ValueError, match=r"has no test\.jsonl of HuggingFaceH4/MATH-500"):
        prepare("math500", tmp_path, source=tmp_path)

    (tmp_path / LOCK).write_text("[")
    with pytest.raises(ValueError, match=r"digests\.json is damaged: .*; restore it, or prepare into another folder"):
        prepare("math500", tmp_path, source=write("math500", tmp_path / "file"))
    (tmp_path / LOCK).unlink()

    def no_network(*_given: Any, **_options: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", no_network)
    with pytest.raises(ValueError, match=r"cannot be fetched: no route to host; .* --revision 6e4ed1a2a79af7d8"):
        prepare("math500", tmp_path)


def test_the_command_prepares_several_and_says_what_to_do_next(small: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("data", "prepare", "aime25", "--from", small("aime25"), "--to", out, "--family", "base")
    assert f"tepo eval MODEL_DIR --run {out / SETS}" in result.output
    config = load_run(out / SETS, ["evaluate.every=5"])
    assert config.evaluate.sets["aime25"].samples == 32
    listed = json.loads(invoke("data", "benchmarks", "--json").output)
    assert set(listed) == set(BENCHMARKS)
