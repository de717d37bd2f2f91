"""Built-in environments (docs/guides/environments.md), and adapters for libraries that are not imported here."""

import ast
import asyncio
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from inspect import signature
from typing import Any

from tepo_megatron.config.reward import PROGRAM_SECONDS, PROGRAMS_AT_ONCE
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.sandbox import Sandbox
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.environments.protocol import Observation, StepResult, awaited, takes_seed
from tepo_megatron.tasks.reward.verifiers import load_verifier

_LONGEST = 200
_LARGEST = Decimal(10) ** 25
_OPERATORS: Mapping[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: a // b - (1 if _rounds_up(a, b) else 0),
    ast.Mod: lambda a, b: a % b + (b if _rounds_up(a, b) else 0),
}


def _rounds_up(a: Decimal, b: Decimal) -> bool:
    """Decimal rounds a quotient to 0, Python down."""
    return a % b != 0 and (a < 0) != (b < 0)


class _Tool:
    """The model's last text between ``begin`` and ``end`` is for the tool; without one the turn is the answer."""

    def __init__(self, begin: str, end: str, open: str, close: str, verifier: str) -> None:
        self._call = re.compile(re.escape(begin) + r"(.*?)" + (re.escape(end) if end else "$"), re.S)
        self._open, self._close = open, close
        self._verify = load_verifier(verifier)
        self._problem: Problem | None = None

    def reset(self, problem: Problem, seed: int) -> None:
        self._problem = problem

    def _asked(self, action: ResponseText) -> str | StepResult:
        asked = self._call.findall(action)
        return asked[-1] if asked else StepResult(reward=self._verify(self._problem, action), done=True)

    def _shown(self, text: str) -> str:
        return f"{self._open}{text}{self._close}"


class Calculator(_Tool):
    """An invalid expression gets ``error`` and the reason, and costs ``penalty``."""

    def __init__(
        self,
        begin: str = "<calc>",
        end: str = "</calc>",
        open: str = "<result>",
        close: str = "</result>",
        verifier: str = "last_word",
        penalty: float = 0.0,
    ) -> None:
        super().__init__(begin, end, open, close, verifier)
        self._penalty = penalty

    def step(self, action: ResponseText) -> StepResult:
        expression = self._asked(action)
        if isinstance(expression, StepResult):
            return expression
        try:
            return StepResult(self._shown(_compute(expression)))
        except ValueError as error:
            return StepResult(self._shown(f"error: {error}"), reward=-self._penalty, tool_error=True)


def _compute(expression: str) -> str:
    if len(expression) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().lstrip("=").strip(), mode="eval")
        value = _value(tree.body) + 0  # no -0
    except (SyntaxError, RecursionError, MemoryError, ArithmeticError) as error:
        raise ValueError("not computable") from error
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _value(node: ast.expr) -> Decimal:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        result = Decimal(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("not arithmetic")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """The first number of a turn is the guess; a turn without one is a tool error."""

    def __init__(self, turns: int = 3) -> None:
        self._left = turns
        self._number = 0

    def reset(self, problem: Problem, seed: int) -> None:
        self._number = int(problem.answer)

    def step(self, action: ResponseText) -> StepResult:
        self._left -= 1
        match = _NUMBER.search(action)
        guess = None if match is None else int(match[0])
        if guess == self._number:
            return StepResult(reward=1.0, done=True)
        hint = "?" if guess is None else ("<" if self._number < guess else ">")
        return StepResult(hint, done=self._left <= 0, tool_error=guess is None)


class PythonTool(_Tool):
    """Limits: ``seconds`` of wall and processor time, ``memory_mb``, ``output`` characters, 64 open files of 10 MB, no
    child processes or threads, 16 programs at a time per worker (``call_limit_s``). A failing or silent program is a tool
    error. Raises RuntimeError without ``environment.run_code`` or a kernel that can cut the network.
    """

    runs_code = True
    _at_once = asyncio.Semaphore(PROGRAMS_AT_ONCE)

    def __init__(
        self,
        begin: str = "<python>",
        end: str = "</python>",
        open: str = "<output>",
        close: str = "</output>",
        verifier: str = "last_word",
        seconds: float = PROGRAM_SECONDS,
        memory_mb: int = 256,
        output: int = 2000,
    ) -> None:
        super().__init__(begin, end, open, close, verifier)
        self._sandbox, self._output = Sandbox(seconds, memory_mb), output

    async def step(self, action: ResponseText) -> StepResult:
        program = self._asked(action)
        if isinstance(program, StepResult):
            return program
        async with self._at_once:
            text, failed = await self._run(program)
        return StepResult(self._shown(text), tool_error=failed)

    async def _run(self, program: str) -> tuple[str, bool]:
        ran = await self._sandbox.run(("-c", program), kept=4 * self._output)
        if ran.limit is not None:
            return f"error: {ran.limit}", True
        if ran.status != 0:
            lines = ran.tail.decode("utf-8", "replace").strip().splitlines()
            return f"error: {lines[-1][: self._output] if lines else f'it ended with {ran.status}'}", True
        text = ran.head.decode("utf-8", "replace").strip()
        shown = text if len(text) <= self._output else f"{text[: self._output]} ..."
        return shown or "(it printed nothing)", not shown


class _Gymnasium:
    """The problem is in ``options`` of ``reset``. A true ``tool_error`` in the info counts."""

    def __init__(self, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._environment = make(**kwargs)

    def reset(self, problem: Problem, seed: int) -> Observation:
        options = {"id": problem.id, "prompt": problem.prompt, "answer": problem.answer, **problem.metadata}
        observation, _ = self._environment.reset(seed=seed % 2**32, options=options)
        return _readable(observation)

    def step(self, action: ResponseText) -> StepResult:
        observation, reward, terminated, truncated, info = self._environment.step(str(action))
        tool_error = bool(info.get("tool_error")) if isinstance(info, Mapping) else False
        return StepResult(_readable(observation), reward, bool(terminated or truncated), tool_error)

    def close(self) -> None:
        self._environment.close()


class _SkyrlGym:
    """A ``BaseTextEnv``: ``environment.kwargs`` are ``env_config``, metadata are ``extras`` (by default the answer is
    ``reward_spec.ground_truth``). ``init`` must not change the prompt.
    """

    def __init__(self, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._make, self._kwargs = make, dict(kwargs)
        self._environment: Any = None

    def reset(self, problem: Problem, seed: int) -> Observation:
        extras = {"reward_spec": {"ground_truth": problem.answer}, "max_turns": 1, **problem.metadata}
        self._environment = self._make(env_config=self._kwargs, extras=extras)
        prompt = [{"role": "user", "content": problem.prompt}]
        opening, _ = self._environment.init(prompt)
        if opening != prompt:
            raise ValueError("init changed the prompt; write the prompt as the model is to read it into the data")
        return None

    def step(self, action: ResponseText) -> StepResult:
        result = self._environment.step(str(action))
        metadata = result.get("metadata") or {}
        return StepResult(result["observations"], result["reward"], bool(result["done"]), bool(metadata.get("tool_error")))

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


class _TextArena:
    def __init__(self, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._game = make(**kwargs)

    def reset(self, problem: Problem, seed: int) -> Observation:
        self._game.reset(num_players=1, seed=seed % 2**32)
        return self._new_messages()

    def step(self, action: ResponseText) -> StepResult:
        done, _ = self._game.step(str(action))
        if not done:
            return StepResult(self._new_messages())
        rewards, infos = self._game.close()
        return StepResult(None, float(rewards[0]), True, bool(infos[0].get("invalid_move")))

    def _new_messages(self) -> str:
        # The wrapper for language models repeats the whole history, which the model has read.
        messages = self._game.state.get_current_player_observation()
        return "\n".join(text for _, text, kind in messages if kind.name != "PLAYER_ACTION")

    def close(self) -> None:
        """The game was closed at its end."""


class _OpenEnv:
    def __init__(self, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        options = dict(kwargs)
        missing = [name for name in ("action", "action_field") if name not in options]
        if missing:
            raise ValueError(f"environment.kwargs needs {' and '.join(missing)} for adapter = openenv")
        self._action = load_user_code(options.pop("action"), "the OpenEnv action")
        self._field, self._shown = options.pop("action_field"), options.pop("observation_field", None)
        self._client = make(**options)

    async def reset(self, problem: Problem, seed: int) -> Observation:
        arguments = {"seed": seed % 2**32} if takes_seed(signature(self._client.reset)) else {}
        return self._text((await awaited(self._client.reset(**arguments))).observation)

    async def step(self, action: ResponseText) -> StepResult:
        result = await awaited(self._client.step(self._action(**{self._field: str(action)})))
        reward = 0.0 if result.reward is None else result.reward
        return StepResult(self._text(result.observation), reward, bool(result.done))

    async def close(self) -> None:
        await awaited(self._client.close())

    def _text(self, observation: Any) -> Observation:
        shown = observation if self._shown is None else getattr(observation, self._shown)
        return _readable(shown)


ADAPTERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "gymnasium": _Gymnasium,
    "skyrl_gym": _SkyrlGym,
    "textarena": _TextArena,
    "openenv": _OpenEnv,
}


def _readable(observation: Any) -> Observation:
    if observation is None or isinstance(observation, str):
        return observation
    if isinstance(observation, Sequence) and all(type(item) is int or isinstance(item, Mapping) for item in observation):
        return observation
    return str(observation)
