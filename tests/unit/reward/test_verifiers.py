"""The verifiers that ship. ``math`` is compared with 300 pairs of answers that were judged by hand, and what a model writes is
executed nowhere: sympy evaluates texts of digits and operators only. The judge behind an address is asked over HTTP, here a
small server that answers as it is told.
"""

import asyncio
import importlib
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.reward import math_verifier
from tepo_megatron.tasks.reward.judge import Judge, JudgeError
from tepo_megatron.tasks.reward.math_verifier import math
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.tasks.reward.verifiers import check_reachable, exact, last_number, last_word, load_verifier
from tests.support.http_server import http_server
from tests.support.programs import TIMEOUT_S, run_python


def _problem(answer: str) -> Problem:
    return Problem("p", "question", answer)


word = st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1)


@given(words=st.lists(word, max_size=5), answer=word, space=st.sampled_from([" ", "\n", "\t", "  "]))
def test_last_word(words: list[str], answer: str, space: str) -> None:
    assert last_word(_problem(answer), space.join([*words, answer])) == 1.0
    assert last_word(_problem(answer), space.join([answer, *words, answer + "x"])) == 0.0
    assert last_word(_problem(answer), "".join([*words, "x", answer])) == 0.0
    for response in ("", " \n", f"3+5+1=9 9\ufffd{answer}"):
        assert last_word(_problem(answer), response) == 0.0


@pytest.mark.parametrize(("name", "solvable", "never"), [("last_word", "95", "7 15"), ("last_number", "is 95", "ninety")])
def test_a_verifier_that_refuses_the_expected_answers_themselves_is_found(name: str, solvable: str, never: str) -> None:
    assert check_reachable(name, [_problem(solvable), _problem(never), _problem(solvable)]) == 1
    with pytest.raises(ValueError, match=rf"the verifier {name} can give no response a reward: .*{never!r} of problem 'p'"):
        check_reachable(name, [_problem(never)])
    for other in ("exact", "math", "judge", "mine.py:f"):
        assert check_reachable(other, [_problem(never)]) == 0
    assert check_reachable(name, []) == 0


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_exact(text: str) -> None:
    assert exact(_problem(text), f" {text}\n") == 1.0
    assert exact(_problem(text), f"{text}!") == 0.0


@given(value=st.integers(-(10**12), 10**12), other=st.integers(-(10**6), 10**6))
def test_last_number_compares_values(value: int, other: int) -> None:
    for written in (f"{value}", f"{value:,}", f"{value}.0", f"{value:,}.00"):
        assert last_number(_problem(str(value)), f"from {other} follows {written}.") == 1.0
    assert last_number(_problem(str(value)), f"{value} or {value + 1}") == 0.0


def test_last_number_reads() -> None:
    numbers = {"7-5": "5", "x=-5": "-5", "1,2,3": "3", "12,3456": "3456", "$.5": "0.5", "2e3": "2000", "so (-3)": "-3"}
    numbers |= {r"\boxed{1{,}234{,}567}": "1234567", "It is −7": "-7", "3−5": "5"}
    for response, number in numbers.items():
        assert last_number(_problem(number), response) == 1.0, response
    assert last_number(_problem("3"), "three") == 0.0
    assert last_number(_problem("3"), "3e4567890123456789012") == 0.0
    with pytest.raises(ValueError, match="no number in it"):
        last_number(_problem("three"), "3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last_wrod", "known: exact, last_number, last_word, math, .*did you mean last_word"),
        ("my module:f", "not of the form"),
        ("no_such_package.x:f", "importing no_such_package.x raised ModuleNotFoundError"),
        ("tepo_megatron.core.types:nothing", "tepo_megatron.core.types has no function nothing"),
    ],
)
def test_unknown_verifiers(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_verifier(name)


def test_a_verifier_that_was_edited_at_once_is_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size and the second of its last change Python takes it for the old one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "own.py"
    for reward in (1.0, 0.5):
        path.write_text(f"def score(problem, response):\n    return {reward}\n")
        os.utime(path, (10**9, 10**9))
        assert load_verifier(f"{path}:score")(_problem("3"), "3") == reward


def test_worker_imports_nothing_heavy() -> None:
    heavy = ("torch", "sympy", "numpy", "pydantic")
    code = f"import sys, tepo_megatron.tasks.reward.worker; print([m for m in {heavy} if m in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes its time."""
    monkeypatch.setattr(math_verifier, "_SOFT_LIMIT_S", 600)


@pytest.mark.usefixtures("patience")
def test_math_verify_agrees_but_for_what_is_listed() -> None:
    """A line: a kind, what is expected, what is given, whether they are the same, and math-verify's answer where it differs.
    One that is listed and agrees now (a newer math-verify) fails too, so that the list stays true.
    """
    math, wrong = load_verifier("math"), []
    for line in Path(__file__).with_name("golden_math.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            _, expected, given, *verdicts = line.split("\t")
            response = given[4:] if given.startswith("raw:") else f"The answer is $\\boxed{{{given}}}$."
            if int(math(_problem(expected), response)) != int(verdicts[-1]):
                wrong.append(line)
    assert not wrong, "\n".join(wrong)
    with pytest.raises(ValueError, match="Can't evaluate nan or zoo"):
        math(_problem(r"\frac{1}{0}"), "5")


HARMLESS = {"Integer", "Float", "Rational", "Number", "Add", "Mul", "Pow"}
"""Names that sympy writes into what it evaluates."""

CODE = (
    "__import__('os').system('touch {0}')",
    "open('{0}','w')",
    'exec(\'open("{0}", "w")\')',
    "().__class__.__base__.__subclasses__()",
    "1+__import__('os').mkdir('{0}')",
    "1/2*(open('{0}','w'))",
    "Symbol('x').__class__.__init__.__globals__",
    "lambda: open('{0}','w')",
    "2^(open('{0}','w'))",
    'sympify(\'open("{0}","w")\')',
    "\\operatorname{{eval}}(open('{0}','w'))",
    "\\text{{__import__('os').mkdir('{0}')}}",
    "\\input{{{0}}}",
    "\\write18{{touch {0}}}",
    "1/2 + (1)\n__import__('os').mkdir('{0}')",
)
WRAPPINGS = ("{0}", "final answer is {0}. I hope", "\\boxed{{{0}}}", "${0}$", "$$x = {0}$$", "answer: 1/2+3*{0}")


def score(response: str) -> float | None:
    try:
        return math(_problem("1/2"), response)
    except Exception:  # what cannot be read is no number; only what was evaluated counts here
        return None


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("4.5e33", r"\boxed{4.5 \times 10^{33}}", True),
        ("3e8", r"\boxed{300000000}", True),
        ("3e8", r"\boxed{24e}", False),  # e is not Euler's number there
        ("1500", "The answer is 1.5e3.", True),
        ("1e-05", "So it is 0.00001", True),
        ("2e-1", r"\boxed{-1+2e}", True),  # and it is here
        (r"\frac{2e+1}{3}", r"\boxed{\frac{1+2e}{3}}", True),
        ("5", "1e99 " * 2000, False),  # in time
        ("100000", "7.5e3 " * 200 + r"\boxed{1e5}", True),
        ("(100000,200000)", r"\boxed{(1e5,2e5)}", True),
        (r"1.6 \times 10^{-19}", r"\boxed{9.1 \times 10^{-31}}", False),
        (r"1.6 \times 10^{-19}", r"\boxed{1.6e-19}", True),
        ("0.0000012", r"\boxed{0.000001}", False),
        (r"\frac{1}{3}", r"\boxed{0.333333}", True),
        ("16", "<think>So \\boxed{12}? No.</think>The answer is **16**.", True),
        ("12", "<think>So \\boxed{12}? No.</think>The answer is **16**.", False),
        ("-5", "The answer is −5.", True),
        ("5", f"The answer is {'1' * 5000}", False),  # more digits than sympy reads
        ("\\begin{pmatrix}\n1 \\\\\n4\n\\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\4\end{pmatrix}}", True),
        ("$\n\\begin{pmatrix}\n1 \\\\\n4\n\\end{pmatrix}\n$", r"\boxed{4}", False),
        (r"\[ \begin{pmatrix}1\\4\end{pmatrix} \]", r"\boxed{\begin{pmatrix}1\\4\end{pmatrix}}", True),
    ],
)
def test_math_reads_numbers_as_they_are_written(answer: str, response: str, right: bool) -> None:
    assert math(_problem(answer), response) == right


def test_hostile_answers_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a control, an expression of digits and operators is evaluated."""
    names: set[str] = set()
    sympy_parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    original = sympy_parser.eval_expr

    def note(code: str | CodeType, *arguments: Any) -> Any:
        compiled = compile(code, "<answer>", "eval") if isinstance(code, str) else code
        names.update(compiled.co_names)
        names.update("a function" for constant in compiled.co_consts if isinstance(constant, CodeType))
        return original(code, *arguments)

    monkeypatch.setattr(sympy_parser, "eval_expr", note)
    assert score("The answer is 1/4 + 1/4.") == 1.0
    assert {"Integer", "Add"} <= names
    for code in CODE:
        for wrapping in WRAPPINGS:
            score(wrapping.format(code.format(tmp_path / "proof")))
    assert list(tmp_path.iterdir()) == []
    assert names <= HARMLESS


KEY = "sk-very-secret"


class JudgeServer:
    """Grades as the response in the question says: ``right``, ``wrong``, a status, or something that is no grade."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    def answer(self, path: str, headers: Mapping[str, str], content: bytes) -> tuple[int, bytes]:
        body = json.loads(content)
        question = body["messages"][0]["content"].rpartition("|")[2]
        self.asked[question] += 1
        self.requests.append(body)
        self.keys.add(headers["Authorization"])
        if question == "silent":
            threading.Event().wait(TIMEOUT_S)
        if question.startswith("status"):
            return int(question.split()[1]), f"wrong: {headers['Authorization']}".encode()
        said = {"right": "yes. Score: 0 … no, Score: 1", "half": "Score: 0.5", "busy once": "Score: 1", "cut": "Score: 1"}
        message = {"role": "assistant", "content": said.get(question, "I like it")}
        reply = {"choices": [{"message": message, "finish_reason": "length" if question == "cut" else "stop"}]}
        status = 429 if (question, self.asked[question]) == ("busy once", 1) else 200
        return status, b"<html>" if question == "no json" else json.dumps(reply).encode()


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    with http_server(server.answer, {"Retry-After": "0.01"}) as server.url:
        yield server


def kwargs(server: JudgeServer, **others: object) -> dict[str, object]:
    prompt = "is {answer} to {prompt} in {{braces}} |{response}"
    return {"base_url": f"{server.url}/v1", "model": "m", "prompt": prompt, "retries": 2, **others}


@pytest.mark.parametrize(
    ("pattern", "score"), [(r"Score:\s*(\d+(\.\d+)?)", 1.0), (r"\d+", 1.0), ("(Score)", None), (r"Score|(\d)x", None)]
)
def test_the_first_group_of_a_pattern_is_the_score(server: JudgeServer, pattern: str, score: float | None) -> None:
    judge: Any = Judge(**kwargs(server, pattern=pattern))  # type: ignore[arg-type]
    with nullcontext() if score else pytest.raises(JudgeError, match="has no score"):
        assert asyncio.run(judge.score(_problem("a"), ResponseText("right"))) == score
    cut: Any = Judge(**kwargs(server, pattern="1$"))  # type: ignore[arg-type]
    assert asyncio.run(cut.score(_problem("a"), ResponseText("cut"))) == 1.0


@pytest.mark.parametrize(
    ("reply", "score", "own_prompts_score"),
    [
        ("Score: 1.", 1.0, 1.0),
        ("Score: 0.25", 0.25, 0.25),
        ("Score: 100", None, 100.0),
        ("Score: -1", None, -1.0),
        ("Score: 1/10", None, None),
        ("Score: 10 / 10", None, None),
        ("Score: 0.5/1", None, None),
        ("Score: 1 or Score: 0, I was asked. Score: 1/1", None, None),
    ],
)
def test_a_score_is_as_the_prompt_asks(reply: str, score: float | None, own_prompts_score: float | None) -> None:
    settings: Any
    for settings, expected in (({}, score), ({"prompt": "{response}?"}, own_prompts_score)):
        judge: Any = Judge("http://127.0.0.1:9/v1", "m", **settings)
        judge.ask = AsyncMock(return_value=reply)
        with pytest.raises(JudgeError, match="has no score") if expected is None else nullcontext():
            assert asyncio.run(judge.score(_problem("a"), ResponseText("5"))) == expected


def test_scores_come_from_the_judge_and_outages_are_failures(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    made = kwargs(server, api_key_env="JUDGE_KEY", body={"top_p": 0.5})
    expected = {
        "right": 1.0,
        "half": 0.5,
        "busy once": 1.0,
        "right {answer}": "reply has no score",
        "no grade": "the judge's reply has no score",
        "cut": "the judge's reply was cut at max_tokens = 512, raise it: 'Score: 1'",
        "no json": "no chat completion: <html>",
        "status 503": "status 503: wrong: Bearer ***",
        "status 401": "status 401: wrong: Bearer ***",
    }
    with RewardPool(RewardConfig(verifier="judge", kwargs=made, timeout_s=60.0)) as pool:
        results = pool.score([(Problem("p", "q", "a"), response) for response in expected])
        for result, wanted in zip(results, expected.values(), strict=True):
            if isinstance(wanted, str):
                assert result.reward is None
                assert wanted in str(result.error)
                assert KEY not in str(result.error)
            else:
                assert (result.reward, result.error) == (wanted, None)
        # What was answered is not asked again, what failed is.
        pool.score([(Problem("p", "q", "a"), response) for response in ("right", "half", "no grade", "status 401", "cut")])
    assert server.asked["right"] == server.asked["half"] == 1
    assert server.asked["no grade"] == server.asked["cut"] == 2
    assert server.asked["status 503"] == 3
    assert server.asked["status 401"] == 2
    assert server.asked["busy once"] == 2
    assert server.keys == {f"Bearer {KEY}"}
    assert server.requests[0]["model"] == "m"
    assert server.requests[0]["top_p"] == 0.5
    assert "is a to q in {{braces}} |right {answer}" in {body["messages"][0]["content"] for body in server.requests}


def test_the_judge_reads_every_message_of_a_chat(server: JudgeServer) -> None:
    judge = Judge(**kwargs(server))  # type: ignore[arg-type]

    async def score_all() -> None:
        for first in ("2+3?", "2+4?"):
            chat = (("user", first), ("assistant", "5"), ("user", "Sure?"))
            await judge.score(Problem("p", "Sure?", "a", messages=chat), ResponseText("right"))
        await judge.score(Problem("p", "2+3?", "a", messages=(("user", "2+3?"),)), ResponseText("right"))

    asyncio.run(score_all())
    chats = [f"user: {first}\n\nassistant: 5\n\nuser: Sure?" for first in ("2+3?", "2+4?")]
    asked = [body["messages"][0]["content"] for body in server.requests]
    assert asked == [f"is a to {prompt} in {{{{braces}}}} |right" for prompt in (*chats, "2+3?")]


def test_nobody_at_the_address_is_a_failure() -> None:
    judge = Judge("http://127.0.0.1:9/v1", "m", retries=0)
    with pytest.raises(JudgeError, match=r"127\.0\.0\.1:9/v1.* gave no reply: Conn"):
        asyncio.run(judge.score(_problem("a"), ResponseText("")))


def test_a_judge_that_is_silent_fails_in_time(server: JudgeServer) -> None:
    """The limit of a try, then the limit of the response, which says what the last try met."""

    async def ask(tries: int | None = None, **others: object) -> None:
        """The response's time is over when so many tries have come to the server."""
        server.asked.clear()
        judge = Judge(**kwargs(server, **others))  # type: ignore[arg-type]
        asking = asyncio.create_task(judge.score(_problem("a"), ResponseText("silent")))
        while tries is not None and not asking.done() and server.asked["silent"] < tries:
            await asyncio.sleep(0.01)
        if tries is not None:
            asking.cancel()
        await asking

    with pytest.raises(JudgeError, match="gave no reply: ReadTimeout"):
        asyncio.run(ask(timeout_s=1.0, retries=0))
    with pytest.raises(JudgeError, match=r"gave no reply in reward\.timeout_s; its last: ReadTimeout"):
        asyncio.run(ask(2, timeout_s=1.0, retries=100))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask(1, timeout_s=TIMEOUT_S))


def test_the_memory_of_replies_is_bounded(server: JudgeServer) -> None:
    judge = Judge(**kwargs(server, cache=2))  # type: ignore[arg-type]

    async def ask_all() -> None:
        for question in ("|1", "|2", "|1", "|3", "|1", "|2"):
            await judge.ask(question)

    asyncio.run(ask_all())
    assert server.asked == {"1": 1, "2": 2, "3": 1}
    assert {len(key) for key in judge._replies} == {16}  # not the questions, of thousands of responses


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"base_url": "localhost:8000"}, "is no address"),
        ({"base_url": "http://me:pass@host/v1"}, "holds a user or a password"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE, which is not set"),
        ({"pattern": "("}, "missing \\), unterminated subpattern"),
    ],
)
def test_what_cannot_be_asked_is_refused(made: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, re.error), match=message) as caught:
        Judge(**{"base_url": "http://host/v1", "model": "m", **made})
    assert "pass@" not in str(caught.value)
