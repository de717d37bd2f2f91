"""Environments of other libraries, each installed into a folder of the user's cache, in the worker processes that play them."""

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import load_run
from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.sampler.vllm.resources import reserve_port
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.environments.environment_task import EnvironmentTask
from tepo_megatron.tasks.environments.protocol import EnvironmentHost, EpisodeAnswer
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tests.support.episodes import VOCABULARY, Letters
from tests.support.launcher import fail_or_skip
from tests.support.programs import TIMEOUT_S, run_python

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/environments"

# The package, and what it imports that this project does not bring.
_PRIME = "aiofiles==25.1.0 connectrpc==0.11.1 prime-sandboxes==0.5.1 prime-tunnel==0.1.15 protobuf-py==0.1.1 " + (
    "protobuf-py-ext==0.1.1 pyqwest==0.12.0 tenacity==9.2.1"
)
PACKAGES = {
    "gymnasium": "gymnasium==1.4.0 farama-notifications==0.0.6",
    "textarena": "textarena==0.7.4 chess==1.11.2 defusedxml==0.7.1 nltk==3.10.4",
    "skyrl_gym": "skyrl-gym==0.4.0 pandas==3.1.1",
    "openenv": "openenv-core==0.3.0 beartype==0.23.1 brotli==1.2.1 exceptiongroup==1.3.2 fastmcp-slim==4.2.3 gradio==6.31.0 "
    "gradio-client==2.7.2 groovy==0.1.2 hf-gradio==0.4.1 orjson==3.13.0 pandas==3.1.1 py-key-value-aio==0.5.0 pydub==0.25.1 "
    "pytz==2026.6 safehttpx==0.1.7 semantic-version==2.10.0 tomlkit==0.14.0",
    "verifiers": f"verifiers==0.4.0 prime-pydantic-config==0.4.3 renderers==0.1.12 tomli-w==1.2.0 {_PRIME}",
    "verifiers_0_1": "verifiers==0.1.14 aiolimiter==1.3.0 datasets==4.6.1 griffelib==2.4.1 msgpack==1.2.4 "
    f"multiprocess==0.70.18 openai-agents==0.24.0 pandas==3.1.1 {_PRIME}",
}

Install = Callable[..., list[str]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package, and more folders, behind this environment's own on the path, which workers take over."""

    def added(name: str, *folders: Path) -> list[str]:
        more = [str(folder) for folder in (installed(PACKAGES[name]), *folders)]
        monkeypatch.setattr(sys, "path", [*sys.path, *more])
        return more

    return added


def installed(requirements: str) -> Path:
    """Of several processes one installs them. Skips the test if the package index cannot be reached."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {requirements}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tepo_megatron"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache / f"packages-{digest}"
    with folder.with_suffix(".lock").open("w") as lock, TemporaryDirectory(dir=cache) as made:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--retries", "1", "--target", f"{made}/made"]
        done = subprocess.run([*pip, *requirements.split()], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            fail_or_skip(f"to install {requirements.split()[0]}", done.stderr)
        Path(made, "made").rename(folder)
    return folder


_numbers = count(1_000_000)  # apart from the task's own


def play(host: EnvironmentHost, turn: Callable[[list[Any]], str], seed: int = 0, problem: Problem | None = None) -> list[Any]:
    """The answers to an episode's beginning and turns; ``turn`` writes the next turn of those so far."""
    number, answers = next(_numbers), list[Any]()
    call = ["reset", (problem or Problem("p", "", "")).to_json(), seed, False]
    while True:
        host.call(number, call)
        while not (found := host.poll(TIMEOUT_S)):
            continue
        assert found[0].error is found[0].lost is None, found
        answers.append(found[0].answer)
        if answers[-1]["done"]:
            host.end(number)
            return answers
        call = ["step", *ResponseText(turn(answers), [5]).to_json()]


def halving(most: int, form: str) -> Callable[[list[Any]], str]:
    """Plays a game of numbers up to ``most``."""

    def turn(answers: list[Any]) -> str:
        low, high = 1, most
        for answer in answers[1:]:
            guess = (low + high) // 2
            is_smaller = any(hint in str(answer["observation"]) for hint in ("<", "lower"))
            low, high = (low, guess - 1) if is_smaller else (guess + 1, high)
        return form.format((low + high) // 2)

    return turn


def check_game(name: str, most: int, lost_after: int, form: str = "{}", **kwargs: Any) -> None:
    """Who halves finds the number, which is the same for a seed, and another one for others; who guesses wrong loses."""
    config = load_run(EXAMPLES / f"{name}.yaml").environment
    config = config.model_copy(update={"timeout_s": 600.0, "kwargs": {**config.kwargs, **kwargs}})
    with closing(EnvironmentWorkers(config)) as host:
        games = [play(host, halving(most, form), seed) for seed in (2**40 + 5, 2**40 + 5, *range(8))]
        assert games[0] == games[1]
        assert len({str(game) for game in games}) > 2
        assert {game[-1]["reward"] for game in games} == {1.0}
        lost = play(host, lambda _: form.format(most + 1))
        assert (len(lost), lost[-1]["done"]) == (1 + lost_after, True)
        assert sum(answer["reward"] for answer in lost) < 1


def check_a_step_of(name: str, **kwargs: Any) -> None:
    """As many episodes as a step has begin and end."""
    run = load_run(EXAMPLES / f"{name}.yaml")
    assert run.environment is not None
    config = run.environment.model_copy(update={"timeout_s": 600.0, "kwargs": {**run.environment.kwargs, **kwargs}})
    numbers, answers = range(run.rollout.prompts_per_step * run.rollout.samples_per_prompt), list[EpisodeAnswer]()
    with closing(EnvironmentWorkers(config)) as host:
        for number in numbers:
            host.call(number, ["reset", Problem("p", "", "").to_json(), 0, False])
        while len(answers) < len(numbers):
            for answer in host.poll(TIMEOUT_S):
                answers.append(answer)
                host.end(answer.episode)
    assert {answer.error for answer in answers} == {None}


@pytest.mark.parametrize(("name", "most", "lost_after", "form"), [("gymnasium", 7, 3, "{}"), ("textarena", 20, 2, "[{}]")])
def test_a_game_of_another_library_is_won_and_lost(install: Install, name: str, most: int, lost_after: int, form: str) -> None:
    """Gymnasium's limit of time is three turns; TextArena ends with the second move that is none."""
    install(name)
    check_game(name, most, lost_after, form)


def test_a_game_of_openenv_is_won_and_lost_on_its_own_server(install: Install) -> None:
    (folder,) = install("openenv")
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
    program = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", program, folder, str(EXAMPLES / "openenv_game.py"), str(port)]
    with subprocess.Popen(command) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            while server.poll() is None:
                try:
                    httpx.get(f"{url}/health", timeout=TIMEOUT_S)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            check_game("openenv", 7, 3, base_url=url)
            check_a_step_of("openenv", base_url=url)
        finally:
            server.kill()


def test_an_environment_of_skyrl_gym_is_played(install: Install) -> None:
    install("skyrl_gym")
    name = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
    with closing(EnvironmentWorkers(EnvironmentConfig(name=name, adapter="skyrl_gym", timeout_s=600.0))) as host:
        says = iter(["#### 41", "#### 42"])
        begun, first, last = play(host, lambda _: next(says), problem=Problem("p", "6*7=", "42", {"max_turns": 3}))
    assert begun["observation"] is None
    assert "in the exact format" in str(first["observation"])
    assert (first["reward"], last["reward"]) == (pytest.approx(0.2 / 3), 1.0)


TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat", "Letters"]

class Data(vf.TaskData):
    answer: str

class Letter(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

class Letters(vf.Taskset[Letter, vf.TasksetConfig]):
    def load(self):
        return [Letter(Data(prompt=f"say{letter}", answer=letter), self.config.task) for letter in "ab"]

class Chat(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "sure"}]
        return ProgramResult(0, "", "")
"""

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [vf.UserMessage(content="sure")]

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def load_environment():
    rows = [{"question": f"say{letter}", "answer": letter} for letter in "ab"]
    return Twice(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=2)
"""


@pytest.mark.parametrize(
    ("package", "module", "code"), [("verifiers", "gsm8k_v1", TASKSET), ("verifiers_0_1", "gsm8k", ENVIRONMENT)]
)
def test_an_environment_of_verifiers_is_an_agent_that_starts_quietly(
    install: Install, package: str, module: str, code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The example's own file, with an environment of that name."""
    (tmp_path / f"{module}.py").write_text(code)
    program = f"import runpy, sys; sys.path += {install(package, tmp_path)}; runpy.run_path(sys.argv[1], run_name='__main__')"
    example = EXAMPLES / f"{package}_agent.py"
    (tmp_path / "problems.jsonl").write_text(run_python("-c", program, example).stdout)
    problems = load_problems(str(tmp_path / "problems.jsonl"))
    assert [problem.prompt for problem in problems] == ["saya", "sayb"]
    solve = {"name": f"{example}:solve", "adapter": "agent", "timeout_s": 600.0, "agent": {"chat_template": False}}
    run = RunConfig.model_validate({"environment": solve})
    with EnvironmentTask(run, Letters(), VOCABULARY, 120) as task:  # type: ignore[arg-type]
        task.rehearse(problems)
        for problem, reward in zip(problems, (0.0, 1.0), strict=True):
            begun, sure, last = play(task.host, lambda answers: "xb"[len(answers) - 1], problem=problem)
            assert begun["observation"][1]["messages"] == [{"role": "user", "content": problem.prompt}]
            assert sure["observation"][1]["messages"] == [{"role": "user", "content": "sure"}]
            assert (last["done"], last["reward"]) == (True, reward)
    assert "episode is over" not in capfd.readouterr().err


def test_the_guide_names_the_versions_that_are_played() -> None:
    guide = (ROOT / "docs/guides/environments.md").read_text()
    assert [named for named in (each.split()[0].replace("==", " ") for each in PACKAGES.values()) if named not in guide] == []
