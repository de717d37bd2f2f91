"""Recorded responses are read from a run's samples and from files of one's own; what cannot be read is named by its line."""

import json
from pathlib import Path

import pytest

from tepo_megatron.core.problem import Problem
from tepo_megatron.tasks.reward.recorded import read_recorded
from tests.support.cli import invoke
from tests.support.data_files import write_jsonl


def test_a_runs_samples_and_lines_of_ones_own(tmp_path: Path) -> None:
    sample = {
        "step": 5,
        "problem": "p1",
        "prompt": "q",
        "answer": "a",
        "greedy": {"response": "g", "finish_reason": "length", "reward": 0.0},
        "sampled": [{"response": "s", "finish_reason": "stop"}, {"response": "t"}],
        "metadata": {"level": 2},
    }
    mine = {"prompt": "q", "answer": 4.5, "responses": ["x", "y"], "finish_reason": "length", "level": 3}
    alone = {"id": 7, "prompt": "q", "answer": "a", "response": "z"}
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n\n".join(json.dumps(each) for each in (sample, mine, alone)))
    groups = read_recorded(path)
    told = [(problem.id, problem.metadata, [(str(each), each.finish_reason) for each in texts]) for problem, texts in groups]
    assert told == [
        ("p1", {"level": 2}, [("g", "length")]),
        ("p1", {"level": 2}, [("s", "stop"), ("t", "stop")]),
        ("mixed:3", {"level": 3}, [("x", "length"), ("y", "length")]),
        ("7", {}, [("z", "stop")]),
    ]
    assert groups[2][0] == Problem("mixed:3", "q", "4.5")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"prompt": "q", "answer": "a"}', "give the text of a response as 'response', or a list"),
        ('{"prompt": "q", "answer": "a", "responses": []}', "give the text of a response"),
        ('{"prompt": "q", "response": "r"}', r"'answer' is missing \(the keys are: prompt, response\)"),
        ('{"problem": "p", "prompt": "q", "answer": "a", "sampled": [{"text": "r"}]}', "has no text under 'response'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "q", "answer": "a", "response": "r"}\n' + line)
    with pytest.raises(ValueError, match=message) as error:
        read_recorded(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_file_without_responses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read"):
        read_recorded(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no response in it"):
        read_recorded(tmp_path / "empty.jsonl")


def test_equal_failures_of_a_verifier_are_shown_once_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(problem, response):\n    return {'none': None, 'text': '1'}.get(response, 1.0)\n"
    )
    said = ["none", "text", "right", "none", "none"]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "a", "response": text} for text in said])
    shown = invoke("reward", "try", path, f"reward.verifier={tmp_path}/mine.py:reward", code=1).stdout
    lines = [line for line in shown.splitlines() if line.startswith("failed: ")]
    assert [("NoneType" in line, line.endswith("(and 2 other responses)")) for line in lines] == [(True, True), (False, False)]
    assert lines[0].startswith("failed: problem 'a:1': the verifier returned NoneType, not a number")
