"""The environments that ship with the package, and those of other libraries behind their adapters."""

import asyncio
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.reward import EnvironmentConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.environments.builtin_environments import ADAPTERS, Calculator, GuessNumber
from tepo_megatron.tasks.environments.protocol import EpisodeAnswer, StepResult
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers


@pytest.mark.parametrize("problem", load_problems("builtin:guess-number-heldout")[:7], ids=lambda problem: problem.answer)
def test_who_halves_finds_each_number(problem: Problem) -> None:
    game, low, high = GuessNumber(turns=3), 1, 7
    game.reset(problem, seed=0)
    while not (result := game.step(ResponseText(f"{(low + high) // 2}"))).done:
        guess = (low + high) // 2
        low, high = (low, guess - 1) if result.observation == "<" else (guess + 1, high)
    assert result == StepResult(reward=1.0, done=True)


def test_a_guess_that_is_none_is_a_mistake_and_costs_a_turn() -> None:
    game = GuessNumber(turns=2)
    game.reset(Problem("p", "", "5"), seed=0)
    assert game.step(ResponseText("what?")) == StepResult("?", tool_error=True)
    assert game.step(ResponseText("about 7")) == StepResult("<", done=True)


@given(st.integers(-999, 999), st.sampled_from(["+", "-", "*", "//", "%"]), st.integers(-99, 999).filter(bool))
def test_a_calculator_computes_what_python_does(a: int, operator: str, b: int) -> None:
    result = Calculator().step(ResponseText(f"<calc>({a}) {operator} ({b})</calc>"))
    assert result.observation == f"<result>{eval(f'({a}) {operator} ({b})')}</result>"


def test_a_calculator_is_asked_and_then_answered() -> None:
    tool = Calculator(penalty=0.1)
    tool.reset(Problem("p", "37+58=", "95"), seed=0)
    assert tool.step(ResponseText("so <calc>37+58</calc>")) == StepResult("<result>95</result>")
    for wrong in ("1/0", "2**9**9", "__import__('os')", "9" * 300, "1+", "x", "9" * 31, "1e999", "10**9*10**9*10**9"):
        result = tool.step(ResponseText(f"<calc>{wrong}</calc>"))
        assert (result.tool_error, result.reward) == (True, -0.1)
        assert str(result.observation).startswith("<result>error: ")
    assert tool.step(ResponseText("it is 95")) == StepResult(reward=1.0, done=True)
    assert tool.step(ResponseText("<calc>= 3+4</calc>")) == StepResult("<result>7</result>")
    assert tool.step(ResponseText("<calc>3/4</calc>")) == StepResult("<result>0.75</result>")


def answers(config: EnvironmentConfig, *turns: str) -> list[Any]:
    found = []
    reset = ["reset", Problem("p", "", "95").to_json(), 0, False]
    with closing(EnvironmentWorkers(config)) as workers:
        for call in [reset, *(["step", *ResponseText(turn).to_json()] for turn in turns)]:
            workers.call(1, call)
            while not (answer := workers.poll(600.0)):
                continue
            assert answer[0].error is None
            found.append(answer[0].answer)
    return found[1:]


def test_programs_run_within_limits_without_network_in_a_folder_that_goes() -> None:
    config = EnvironmentConfig(name="python", run_code=True, timeout_s=600, kwargs={"seconds": 300.0, "output": 50})
    programs = {
        "print(37+58)": ("95", False),
        "open('a','w').write('x'); import os; print(os.listdir())": ("['a']", False),
        "import os; print(os.listdir())": ("[]", False),
        "import socket as s; s.socket().connect(('127.1', 1))": ("error: OSError: [Errno 101] Network is unreachable", True),
        "x = bytearray(10**9)": ("error: MemoryError", True),
        "print('a' * 99)": ("a" * 50 + " ...", False),
        "import os; print(os.environ.get('PYTHONPATH'))": ("None", False),
        "import numpy": ("error: ModuleNotFoundError: No module named 'numpy'", True),
        "pass": ("(it printed nothing)", True),
        "print('a' * 10**7)": ("error: it printed more than 4194304 bytes", True),
    }
    found = answers(config, *(f"<python>{program}</python>" for program in programs), "it is 95")
    shown = [(each["observation"], each["tool_error"]) for each in found[:-1]]
    assert shown == [(["text", f"<output>{text}</output>"], failed) for text, failed in programs.values()]
    assert (found[-1]["reward"], found[-1]["done"]) == (1.0, True)


def test_a_program_that_runs_on_is_ended() -> None:
    config = EnvironmentConfig(name="python", run_code=True, timeout_s=600, kwargs={"seconds": 0.5})
    (found,) = answers(config, "<python>import time; time.sleep(10**6)</python>")
    assert found["observation"] == ["text", "<output>error: it ran longer than 0.5 s</output>"]
    assert found["tool_error"]


def test_waiting_for_other_programs_is_no_time_of_a_call() -> None:
    config = EnvironmentConfig(name="python", run_code=True, timeout_s=1.5, kwargs={"seconds": 1.0})
    program, found = ResponseText("<python>import time; time.sleep(10**6)</python>"), list[EpisodeAnswer]()
    with closing(EnvironmentWorkers(config)) as workers:
        for call in (["reset", Problem("p", "", "95").to_json(), 0, False], ["step", *program.to_json()]):
            for number in range(40):
                workers.call(number, call)
        while len(found) < 80:
            found += workers.poll(600.0)
    assert {answer.error for answer in found} == {None}
    shown = ["text", "<output>error: it ran longer than 1 s</output>"]
    assert [answer.answer["observation"] for answer in found].count(shown) == 40


def test_every_episode_of_a_worker_has_room_for_its_sockets() -> None:
    name = f"{Path(__file__).parents[2]}/support/hostile_environment.py:Connected"
    config, found = EnvironmentConfig(name=name, timeout_s=600), list[EpisodeAnswer]()
    with closing(EnvironmentWorkers(config)) as workers:
        for number in range(config.concurrency):
            workers.call(number, ["reset", Problem("p", "", "").to_json(), 0, False])
        while len(found) < config.concurrency:
            found += workers.poll(600.0)
    assert {answer.error for answer in found} == {None}


def test_programs_are_off_unless_switched_on_whatever_their_environment_is_called() -> None:
    with pytest.raises(ValueError, match=r"set environment\.run_code = true if you mean it"):
        EnvironmentConfig(name="python")
    by_path = "tepo_megatron.tasks.environments.builtin_environments:PythonTool"
    with pytest.raises(ValueError, match=r"set environment\.run_code = true if you mean it"):
        EnvironmentWorkers(EnvironmentConfig(name=by_path, network=False))
    with pytest.raises(ValueError, match="the kernel does not take the network away from it"):
        EnvironmentWorkers(EnvironmentConfig(name=by_path, run_code=True))


def test_a_gymnasium_environment_is_played() -> None:
    opened = ["the game"]
    made = SimpleNamespace(
        reset=lambda **given: (str(given), {}),
        step=lambda action: (["seen", action], 0.5, action == "end", action == "late", {"tool_error": action == "bad"}),
        close=opened.pop,
    )
    game = ADAPTERS["gymnasium"](lambda: made, {})
    given = {"seed": 5, "options": {"id": "p", "prompt": "do", "answer": "42", "level": 2}}
    assert game.reset(Problem("p", "do", "42", {"level": 2}), seed=2**40 + 5) == str(given)
    assert game.step(ResponseText("go")) == StepResult("['seen', 'go']", 0.5)
    assert game.step(ResponseText("bad")).tool_error
    assert game.step(ResponseText("end")).done
    assert game.step(ResponseText("late")).done
    game.close()
    assert opened == []


def test_a_skyrl_gym_environment_is_played() -> None:
    class Env:
        def __init__(self, env_config: dict[str, Any], extras: dict[str, Any]) -> None:
            self.extras, self.changes = extras, env_config.get("changes")

        def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
            return [*prompt, {"role": "user", "content": "more"}] if self.changes else prompt, {}

        def step(self, action: str) -> dict[str, Any]:
            right = action == self.extras["reward_spec"]["ground_truth"]
            told = [] if right else [{"role": "user", "content": "again"}]
            return {"observations": told, "reward": float(right), "done": right, "metadata": {}}

        def close(self) -> None:
            return None

    game = ADAPTERS["skyrl_gym"](Env, {})
    assert game.reset(Problem("p", "do", "42"), seed=0) is None
    assert game.step(ResponseText("41")) == StepResult([{"role": "user", "content": "again"}])
    assert game.step(ResponseText("42")) == StepResult([], 1.0, True)
    game.close()
    with pytest.raises(ValueError, match="init changed the prompt"):
        ADAPTERS["skyrl_gym"](Env, {"changes": True}).reset(Problem("p", "do", "42"), seed=0)


class Game:
    """As TextArena's games are, in a wrapper whose observations repeat the history."""

    def __init__(self, env_id: str) -> None:
        self.env_id, self.unread, self.state = env_id, list[Any](), self

    def reset(self, num_players: int, seed: int) -> None:
        self.tell("PROMPT", f"{self.env_id} for {num_players}, seed {seed}")

    def tell(self, kind: str, text: str) -> None:
        self.unread.append((-1, text, SimpleNamespace(name=kind)))

    def get_current_player_observation(self) -> list[Any]:
        read, self.unread = self.unread, []
        return read

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.tell("PLAYER_ACTION", action)
        self.tell("GAME_MESSAGE", "no")
        self.last = action
        return action != "again", {}

    def close(self) -> tuple[dict[int, int], dict[int, Any]]:
        return {0: 1 if self.last == "right" else -1}, {0: {"invalid_move": self.last == "bad"}}


def test_a_textarena_game_is_played() -> None:
    for last, result in {"right": (1.0, False), "bad": (-1.0, True)}.items():
        game = ADAPTERS["textarena"](Game, {"env_id": "Wordle"})
        assert game.reset(Problem("p", "", ""), seed=2**40 + 5) == "Wordle for 1, seed 5"
        assert game.step(ResponseText("again")) == StepResult("no")
        reward, is_invalid = result
        assert game.step(ResponseText(last)) == StepResult(None, reward, True, is_invalid)


class Client:
    """As an OpenEnv client is; its methods may be awaited or not."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def reset(self) -> SimpleNamespace:
        return SimpleNamespace(observation=SimpleNamespace(text="hello"), reward=None, done=False)

    async def step(self, action: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(observation=SimpleNamespace(text=action.message * 2), reward=None, done=action.message == "end")

    def close(self) -> None:
        return None


def test_an_openenv_client_is_played() -> None:
    kwargs = {"base_url": "http://a", "action": "types:SimpleNamespace", "action_field": "message", "observation_field": "text"}

    async def play() -> list[Any]:
        game = ADAPTERS["openenv"](Client, kwargs)
        begun = await game.reset(Problem("p", "", ""), seed=0)
        played = [begun, await game.step(ResponseText("a")), await game.step(ResponseText("end"))]
        await game.close()
        return played

    assert asyncio.run(play()) == ["hello", StepResult("aa"), StepResult("endend", 0.0, True)]

    class Seeded(Client):
        def reset(self, **arguments: int) -> SimpleNamespace:
            return SimpleNamespace(observation=SimpleNamespace(text=f"{arguments}"), reward=None, done=False)

    game = ADAPTERS["openenv"](Seeded, kwargs)  # a group's episodes begin alike
    assert asyncio.run(game.reset(Problem("p", "", ""), seed=2**40 + 5)) == "{'seed': 5}"
    with pytest.raises(ValueError, match=r"environment\.kwargs needs action_field for adapter = openenv"):
        ADAPTERS["openenv"](Client, {"action": "a:B"})
