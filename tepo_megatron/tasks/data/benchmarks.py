"""Converts published benchmark files to problems and checks their digests (``tepo data prepare``)."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.user_code import unknown
from tepo_megatron.tasks.data.rows import DataFiles, file_digest

LOCK = "digests.json"
SETS = "benchmarks.yaml"

_Row = Mapping[str, Any]
_OfRow = Callable[[_Row], Any]


@dataclass(frozen=True)
class _Prepared:
    name: str
    path: Path
    problems: int
    source: Path
    source_sha256: str
    recorded: bool


def prepare(
    name: str, folder: Path, *, source: Path | None = None, family: str | None = None, accept_changed: bool = False
) -> _Prepared:
    """``source`` None: the pinned revision of the Hugging Face hub. ``family`` None: as before, or ``instruct``. Raises
    ValueError for an unusable file or an unexpected digest.
    """
    if name not in BENCHMARKS:
        raise unknown("benchmark", name, BENCHMARKS)
    benchmark = BENCHMARKS[name]
    if family is not None and family not in _FAMILIES:
        raise unknown("family", family, _FAMILIES)
    path = benchmark.fetch() if source is None else benchmark.find(source)
    digest = file_digest(path)
    lock = _read_lock(folder)
    expected = lock.get(name, {}).get("sha256") or benchmark.sha256
    if expected is not None and digest != expected and not accept_changed:
        whence = f"recorded in {folder / LOCK}" if name in lock else f"of {benchmark.repository} at {benchmark.revision[:12]}"
        raise ValueError(
            f"{path} has the SHA-256 {digest}, but {expected} is {whence}: another file, of which figures are not comparable; "
            "give that one, or take this one from now on (--accept-changed)"
        )
    rows = [row.values() for row in DataFiles.find(path).rows()]
    try:
        problems = benchmark.convert(name, rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if len(problems) != benchmark.problems and not accept_changed:
        raise ValueError(
            f"{path} has {len(problems)} problems, and {benchmark.title} has {benchmark.problems}; give the whole file, or "
            "take this one (--accept-changed)"
        )
    family = family or lock.get(name, {}).get("family") or "instruct"
    content = "".join(json.dumps(problem, ensure_ascii=False) + "\n" for problem in problems).encode()
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
    return _Prepared(name, target, len(problems), path, digest, recorded=expected is None)


def sets_yaml(folder: Path, lock: Mapping[str, Mapping[str, Any]]) -> str:
    sets = {}
    for name in (known for known in BENCHMARKS if known in lock):
        benchmark, entry = BENCHMARKS[name], lock[name]
        family = _FAMILIES[entry["family"]]
        sets[name] = {
            "path": str((folder / f"{name}.jsonl").absolute()),
            "sha256": entry["prepared_sha256"],
            "verifier": benchmark.verifier,
            "samples": benchmark.samples,
            **family.get("code" if benchmark.verifier == "python_tests" else "all", {}),
            **family.get(name, {}),
        }
    head = "# Written by tepo data prepare: tepo eval MODEL --run benchmarks.yaml, or base: benchmarks.yaml in a run.\n"
    return head + yaml.safe_dump({"data": {"heldout": None}, "evaluate": {"sets": sets}}, sort_keys=False, allow_unicode=True)


def _read_lock(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / LOCK
    if not path.is_file():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): dict(entry) for name, entry in result.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; restore it, or prepare into another folder") from error


@dataclass(frozen=True)
class _Benchmark:
    """``benchmarks.yaml`` explains its fields. ``prompt``, ``answer`` may be functions of the row; ``more``: more metadata."""

    title: str
    repository: str
    revision: str
    file: str
    problems: int
    prompt: str | _OfRow = "problem"
    answer: str | _OfRow = "answer"
    id: str | None = "id"
    sha256: str | None = None
    kept: Sequence[str] = ()
    more: Callable[[_Row], _Row] = lambda row: {}
    verifier: str = "math"
    samples: int = 4

    def fetch(self) -> Path:
        try:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(self.repository, self.file, repo_type="dataset", revision=self.revision))
        except Exception as error:  # errors of the hub, the network or a missing package
            why = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise ValueError(
                f"{self.repository} {self.file} cannot be fetched: {why}; fetch it where there is a network (hf download "
                f"{self.repository} {self.file} --repo-type dataset --revision {self.revision} --local-dir FOLDER), and give "
                "--from FOLDER"
            ) from error

    def find(self, source: Path) -> Path:
        for path in (source, source / self.file, source / Path(self.file).name):
            if path.is_file():
                return path
        raise ValueError(
            f"{source} has no {self.file} of {self.repository}; give the file itself, or the folder that 'hf download "
            f"{self.repository} --repo-type dataset --local-dir' has made"
        )

    def convert(self, name: str, rows: Iterable[_Row]) -> list[dict[str, Any]]:
        """Raises ValueError, with the row's number."""
        problems: dict[str, dict[str, Any]] = {}
        for number, row in enumerate(rows, start=1):
            try:
                identity = number - 1 if self.id is None else row[self.id]
                problem = {
                    "id": f"{name}/{identity}",
                    "prompt": _text(self.prompt, row, "prompt", number),
                    "answer": _text(self.answer, row, "answer", number),
                    **{column: row[column] for column in self.kept if row.get(column) is not None},
                    **self.more(row),
                }
            except KeyError as error:
                raise ValueError(
                    f"row {number} has no {error.args[0]}; its columns are {', '.join(row) or 'none'}: this is another file "
                    f"than {self.repository} {self.file}"
                ) from error
            if "tests" in problem and not problem["tests"]:
                raise ValueError(f"row {number} has no tests")
            if problem["id"] in problems:
                raise ValueError(f"row {number} has the id {identity!r}, which another row has too")
            problems[problem["id"]] = problem
        return list(problems.values())


def _text(field: str | _OfRow, row: _Row, what: str, number: int) -> str:
    value = row[field] if isinstance(field, str) else field(row)
    text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if not text:
        raise ValueError(f"row {number} has no {what}, but {json.dumps(value, default=str)[:60]}")
    return text


def _number_after_hashes(row: _Row) -> Any:
    match = re.search(r"####\s*(\S[^\n]*?)\s*$", str(row["answer"]))
    return match[1].replace(",", "") if match else None


def _integer(row: _Row) -> Any:
    """AMC answers are integers, stored as floats."""
    value = row["answer"]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else value


def _humaneval_tests(row: _Row) -> _Row:
    name = row["entry_point"]
    before = re.split(rf"^def {re.escape(name)}\b", row["prompt"], maxsplit=1, flags=re.M)[0]
    return {"tests": [f"{row['test']}\ncheck({name})\n"], "setup": before, "entry_point": name, "stub": row["prompt"]}


def _mbpp_prompt(row: _Row, column: str = "text") -> Any:
    tests = "\n".join(row["test_list"])
    return row[column] and f"{row[column].strip()}\n\nYour code should pass these tests:\n\n{tests}"


_MBPP: Mapping[str, Any] = {
    "prompt": _mbpp_prompt,
    "more": lambda row: {"tests": list(row["test_list"]), "setup": row["test_setup_code"] or ""},
}
_COMPUTED: Mapping[str, Mapping[str, Any]] = {
    "amc23": {"answer": _integer},
    "olympiadbench": {
        "prompt": lambda row: f"{row['context']}\n\n{row['question']}" if row.get("context") else row["question"],
        "answer": lambda row: ", ".join(str(answer).strip().strip("$") for answer in row["final_answer"] or []),
    },
    "gsm8k": {"answer": _number_after_hashes},
    "humaneval": {"answer": lambda row: f"{row['prompt']}{row['canonical_solution']}", "more": _humaneval_tests},
    "mbpp": _MBPP,
    "mbpp-sanitized": {
        "prompt": partial(_mbpp_prompt, column="prompt"),
        "more": lambda row: {"tests": list(row["test_list"]), "setup": "\n".join(row["test_imports"] or [])},
    },
    "mbpp-train": _MBPP,
}
_KNOWN = yaml.safe_load(files("tepo_megatron.tasks.data").joinpath("benchmarks.yaml").read_text(encoding="utf-8"))
_FAMILIES: Mapping[str, Mapping[str, Any]] = _KNOWN["families"]
BENCHMARKS: Mapping[str, _Benchmark] = {
    name: _Benchmark(**entry, **_COMPUTED.get(name, {})) for name, entry in _KNOWN["benchmarks"].items()
}
