"""Converts published benchmark files to problems and checks their digests (``tepo data prepare``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.tasks.data.rows import file_digest, read_rows

LOCK = "digests.json"

SETS = "benchmarks.yaml"


@dataclass(frozen=True)
class Prepared:
    name: str
    path: Path
    problems: int
    source: Path
    source_sha256: str
    recorded: bool


def prepare(
    name: str, folder: Path, *, source: Path | None = None, family: str | None = None, accept_changed: bool = False
) -> Prepared:
    """``source`` None: the pinned revision of the Hugging Face hub. ``family`` None: as before, or ``instruct``. Raises
    ValueError for an unusable file or an unexpected digest.
    """
    benchmark = _find_benchmark(name)
    families = templates()
    if family is not None and family not in families:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(families)}")
    path = _fetch(benchmark) if source is None else _find(benchmark, source)
    digest = file_digest(path)
    lock = _read_lock(folder)
    expected = lock.get(name, {}).get("sha256") or benchmark.sha256
    if expected is not None and digest != expected and not accept_changed:
        whence = f"recorded in {folder / LOCK}" if name in lock else f"of {benchmark.repository} at {benchmark.revision[:12]}"
        raise ValueError(
            f"{path} has the SHA-256 {digest}, but {expected} is {whence}: another file, of which figures are not comparable; "
            "give that one, or take this one from now on (--accept-changed)"
        )
    rows = list(read_rows(path))
    try:
        problems = convert(name, benchmark, (row.values() for row in rows))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if len(problems) != benchmark.problems and not accept_changed:
        raise ValueError(
            f"{path} has {len(problems)} problems, and {benchmark.title} has {benchmark.problems}; give the whole file, or "
            "take this one (--accept-changed)"
        )
    family = family or lock.get(name, {}).get("family") or "instruct"
    content = _as_lines(problems)
    target = folder / f"{name}.jsonl"
    lock[name] = {
        "title": benchmark.title,
        "repository": benchmark.repository,
        "revision": benchmark.revision if source is None else None,
        "file": benchmark.file,
        "sha256": digest,
        "problems": len(problems),
        "prepared_sha256": sha256(content).hexdigest(),
        "family": family,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    write_atomically(folder / LOCK, (json.dumps(lock, indent=2, sort_keys=True) + "\n").encode())
    write_atomically(folder / SETS, sets_yaml(folder, lock).encode())
    return Prepared(name, target, len(problems), path, digest, recorded=expected is None)


def sets_yaml(folder: Path, lock: Mapping[str, Mapping[str, Any]]) -> str:
    sets = {}
    for name in (known for known in BENCHMARKS if known in lock):
        benchmark, entry = BENCHMARKS[name], lock[name]
        value = templates()[entry["family"]]
        sets[name] = {
            "path": str((folder / f"{name}.jsonl").absolute()),
            "sha256": entry["prepared_sha256"],
            "verifier": benchmark.verifier,
            "samples": benchmark.samples,
            **value.get(benchmark.prompts, {}),
            **value.get(name, {}),
        }
    head = "# Written by tepo data prepare: tepo eval MODEL --run benchmarks.yaml, or base: benchmarks.yaml in a run.\n"
    return head + yaml.safe_dump({"data": {"heldout": None}, "evaluate": {"sets": sets}}, sort_keys=False, allow_unicode=True)


@cache
def templates() -> Mapping[str, Mapping[str, Any]]:
    """Model family → fields of an evaluation set, by ``all``, ``code`` or a benchmark's name."""
    text = files("tepo_megatron.tasks.data").joinpath("benchmark_templates.yaml").read_text(encoding="utf-8")
    result: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return result


def _read_lock(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / LOCK
    if not path.is_file():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): dict(entry) for name, entry in result.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; restore it, or prepare into another folder") from error


def _fetch(benchmark: Benchmark) -> Path:
    try:
        return _download(benchmark)
    except Exception as error:  # errors of the hub, the network or a missing package
        why = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"{benchmark.repository} {benchmark.file} cannot be fetched: {why}; fetch it where there is a network (hf download "
            f"{benchmark.repository} {benchmark.file} --repo-type dataset --revision {benchmark.revision} --local-dir FOLDER), "
            "and give --from FOLDER"
        ) from error


def _download(benchmark: Benchmark) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(benchmark.repository, benchmark.file, repo_type="dataset", revision=benchmark.revision))


def _find(benchmark: Benchmark, source: Path) -> Path:
    candidates: Sequence[Path] = [source] if source.is_file() else [source / benchmark.file, source / Path(benchmark.file).name]
    for path in candidates:
        if path.is_file():
            return path
    raise ValueError(
        f"{source} has no {benchmark.file} of {benchmark.repository}; give the file itself, or the folder that "
        f"'hf download {benchmark.repository} --repo-type dataset --local-dir' has made"
    )


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """``sha256`` None: the first preparation records it. ``samples``: usual number per problem. ``kept``: columns for the
    metadata.
    """

    title: str
    repository: str
    revision: str
    file: str
    problems: int
    prompt: Callable[[Row], Any]
    answer: Callable[[Row], Any]
    id: Callable[[Row], Any] | None = None
    sha256: str | None = None
    kept: tuple[str, ...] = ()
    more: Callable[[Row], Row] = lambda row: {}
    verifier: str = "math"
    samples: int = 4
    columns: tuple[str, ...] = field(default=())

    @property
    def prompts(self) -> str:
        return "code" if self.verifier == "python_tests" else "all"


def _find_benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        near = get_close_matches(name, BENCHMARKS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}{hint}")
    return BENCHMARKS[name]


def _column(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def _number_after_hashes(row: Row) -> Any:
    """GSM8K ends each solution with ``#### 1,234``."""
    match = re.search(r"####\s*(\S[^\n]*?)\s*$", str(row["answer"]))
    return match[1].replace(",", "") if match else None


def _integer(row: Row) -> Any:
    """AMC answers are integers, stored as floats."""
    value = row["answer"]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else value


def _olympiad_prompt(row: Row) -> Any:
    context = row.get("context")
    return f"{context}\n\n{row['question']}" if context else row["question"]


def _olympiad_answer(row: Row) -> Any:
    parts = [str(answer).strip().strip("$") for answer in row["final_answer"] or []]
    return ", ".join(parts)


def _humaneval_answer(row: Row) -> Any:
    return f"{row['prompt']}{row['canonical_solution']}"


def _humaneval_tests(row: Row) -> Row:
    name = row["entry_point"]
    before = re.split(rf"^def {re.escape(name)}\b", row["prompt"], maxsplit=1, flags=re.M)[0]
    return {"tests": [f"{row['test']}\ncheck({name})\n"], "setup": before, "entry_point": name, "stub": row["prompt"]}


def _mbpp_prompt(column: str) -> Callable[[Row], Any]:
    return lambda row: (
        row[column] and f"{row[column].strip()}\n\nYour code should pass these tests:\n\n" + "\n".join(row["test_list"])
    )


def _mbpp_tests(row: Row) -> Row:
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    return {"tests": list(row["test_list"]), "setup": setup}


def _mbpp(title: str, file: str, sha256: str, problems: int, **changes: Any) -> Benchmark:
    value: dict[str, Any] = {
        "prompt": _mbpp_prompt("text"),
        "columns": ("task_id", "text", "code", "test_list", "test_setup_code"),
    }
    return Benchmark(
        title=title,
        repository="google-research-datasets/mbpp",
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        file=file,
        sha256=sha256,
        problems=problems,
        answer=_column("code"),
        id=_column("task_id"),
        more=_mbpp_tests,
        verifier="python_tests",
        **{**value, **changes},
    )


BENCHMARKS: Mapping[str, Benchmark] = {
    "math500": Benchmark(
        title="MATH-500",
        repository="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        file="test.jsonl",
        sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        problems=500,
        columns=("problem", "answer", "unique_id"),
        prompt=_column("problem"),
        answer=_column("answer"),
        id=_column("unique_id"),
        kept=("subject", "level"),
    ),
    "aime24": Benchmark(
        title="AIME 2024",
        repository="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        file="data/train-00000-of-00001.parquet",
        sha256="26139847601a5037c237d5928b195e7260ca8074cf4f264b794af42847f79ccf",
        problems=30,
        columns=("id", "problem", "answer"),
        prompt=_column("problem"),
        answer=_column("answer"),
        id=_column("id"),
        kept=("url", "year"),
        samples=32,
    ),
    "aime25": Benchmark(
        title="AIME 2025",
        repository="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        file="test.jsonl",
        sha256="b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
        problems=30,
        columns=("id", "problem", "answer"),
        prompt=_column("problem"),
        answer=_column("answer"),
        id=_column("id"),
        samples=32,
    ),
    "amc23": Benchmark(
        title="AMC 2023",
        repository="math-ai/amc23",
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        file="test-00000-of-00001.parquet",
        sha256="b696e87ba47be4e879a60fd4ef1d4aa522ba78c5ae013c6aff5cc9788a397c5e",
        problems=40,
        columns=("id", "question", "answer"),
        prompt=_column("question"),
        answer=_integer,
        id=_column("id"),
        kept=("url",),
        samples=32,
    ),
    "minerva": Benchmark(
        title="Minerva Math",
        repository="math-ai/minervamath",
        revision="ee46ddc498933b1977577953250ca5c66be64f96",
        file="test.jsonl",
        problems=272,
        columns=("question", "answer"),
        prompt=_column("question"),
        answer=_column("answer"),
    ),
    "olympiadbench": Benchmark(
        title="OlympiadBench, open-ended English competition mathematics, text only",
        repository="Hothan/OlympiadBench",
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
        file="OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",
        problems=674,
        columns=("id", "question", "final_answer"),
        prompt=_olympiad_prompt,
        answer=_olympiad_answer,
        id=_column("id"),
        kept=("subfield", "answer_type", "is_multiple_answer", "unit", "error"),
    ),
    "omni-math": Benchmark(
        title="Omni-MATH",
        repository="KbsdJames/Omni-MATH",
        revision="40ba231d8f16e29ecd40e6407e2c8640145a8f62",
        file="test.jsonl",
        sha256="7c87be8ee41ac7c7a597ef5a5500e84bd2b639a85a06db3da7f69bf9a32ef168",
        problems=4428,
        columns=("problem", "answer"),
        prompt=_column("problem"),
        answer=_column("answer"),
        kept=("domain", "difficulty", "source"),
        samples=1,
    ),
    "gsm8k": Benchmark(
        title="GSM8K",
        repository="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        file="main/test-00000-of-00001.parquet",
        sha256="ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59",
        problems=1319,
        columns=("question", "answer"),
        prompt=_column("question"),
        answer=_number_after_hashes,
        samples=1,
    ),
    "humaneval": Benchmark(
        title="HumanEval",
        repository="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        file="openai_humaneval/test-00000-of-00001.parquet",
        sha256="2f2871a15fbc95b6c683043359f4ed8e144c5a1c4f24f25f66bc51f598dfcfb6",
        problems=164,
        columns=("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        prompt=_column("prompt"),
        answer=_humaneval_answer,
        id=_column("task_id"),
        more=_humaneval_tests,
        verifier="python_tests",
    ),
    "mbpp": _mbpp(
        "MBPP, test",
        "full/test-00000-of-00001.parquet",
        "566fd53060ffba5766dace1d1e2f4c38906781526de222b0dfbdbc325b696c77",
        500,
    ),
    "mbpp-sanitized": _mbpp(
        "MBPP, sanitized test",
        "sanitized/test-00000-of-00001.parquet",
        "e9e9efa2c0d59ef5e55537a9d126b8f875d5ac010a8d75628d76824884e15850",
        257,
        prompt=_mbpp_prompt("prompt"),
        columns=("task_id", "prompt", "code", "test_list", "test_imports"),
    ),
    "mbpp-train": _mbpp(
        "MBPP, training part",
        "full/train-00000-of-00001.parquet",
        "09d125ca31edacb7800be8c67c45abff618faf0214ff551291817d06bdb914ae",
        374,
        samples=1,
    ),
}


Problem = Mapping[str, Any]


def convert(name: str, benchmark: Benchmark, rows: Iterable[Row]) -> list[Problem]:
    """Raises ValueError, with the row's number."""
    problems: dict[str, Problem] = {}
    for number, row in enumerate(rows, start=1):
        missing = [column for column in benchmark.columns if column not in row]
        if missing:
            raise ValueError(
                f"row {number} has no {' and no '.join(missing)}; its columns are {', '.join(row) or 'none'}: this is another "
                f"file than {benchmark.repository} {benchmark.file}"
            )
        own = number - 1 if benchmark.id is None else benchmark.id(row)
        problem = {
            "id": f"{name}/{own}",
            "prompt": _text(benchmark.prompt(row), "prompt", number),
            "answer": _text(benchmark.answer(row), "answer", number),
            **{column: row[column] for column in benchmark.kept if row.get(column) is not None},
            **benchmark.more(row),
        }
        if "tests" in problem and not problem["tests"]:
            raise ValueError(f"row {number} has no tests")
        if problem["id"] in problems:
            raise ValueError(f"row {number} has the id {own!r}, which another row has too")
        problems[problem["id"]] = problem
    return list(problems.values())


def _as_lines(problems: Iterable[Problem]) -> bytes:
    return "".join(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems).encode()


def _text(value: Any, what: str, number: int) -> str:
    text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if not text:
        raise ValueError(f"row {number} has no {what}, but {json.dumps(value, default=str)[:60]}")
    return text
