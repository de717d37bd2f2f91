"""Adapters for environments of other libraries, none of which is imported here. One is made per episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.user_code import load_user_code
from tepo_megatron.tasks.environments.protocol import Observation, StepResult


class Gymnasium:
    """A text environment with Gymnasium's interface. ``options`` of ``reset``: the problem's id, prompt, answer and metadata.
    An info with a true ``tool_error`` counts as one.
    """

    def __init__(self, found: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._environment = found(**kwargs)

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


class SkyrlGym:
    """A ``BaseTextEnv`` of SkyRL-Gym, made with ``env_config`` (``environment.kwargs``) and ``extras`` (the problem's
    metadata, with its answer as ``reward_spec.ground_truth`` by default). ``init`` must not change the prompt.
    """

    def __init__(self, found: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._found, self._kwargs = found, dict(kwargs)
        self._environment: Any = None

    def reset(self, problem: Problem, seed: int) -> Observation:
        extras = {"reward_spec": {"ground_truth": problem.answer}, "max_turns": 1, **problem.metadata}
        self._environment = self._found(env_config=self._kwargs, extras=extras)
        prompt = [{"role": "user", "content": problem.prompt}]
        begun, _ = self._environment.init(prompt)
        if begun != prompt:
            raise ValueError("init changed the prompt; write the prompt as the model is to read it into the data")
        return None

    def step(self, action: ResponseText) -> StepResult:
        result = self._environment.step(str(action))
        metadata = result.get("metadata") or {}
        return StepResult(result["observations"], result["reward"], bool(result["done"]), bool(metadata.get("tool_error")))

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


class OpenEnv:
    """A client of an OpenEnv environment in a server. ``environment.kwargs``: ``action`` (``package.module:Class``),
    ``action_field`` (its field for the text), ``observation_field`` (default: the whole observation), and the client's own.
    """

    def __init__(self, found: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        options = dict(kwargs)
        missing = [name for name in ("action", "action_field") if name not in options]
        if missing:
            raise ValueError(f"environment.kwargs needs {' and '.join(missing)} for adapter = openenv")
        self._action = load_user_code(options.pop("action"), "the OpenEnv action")
        self._field, self._shown = options.pop("action_field"), options.pop("observation_field", None)
        self._client = found(**options)

    async def reset(self, problem: Problem, seed: int) -> Observation:
        return self._text((await _awaited(self._client.reset())).observation)

    async def step(self, action: ResponseText) -> StepResult:
        result = await _awaited(self._client.step(self._action(**{self._field: str(action)})))
        reward = 0.0 if result.reward is None else result.reward
        return StepResult(self._text(result.observation), reward, bool(result.done))

    async def close(self) -> None:
        await _awaited(self._client.close())

    def _text(self, observation: Any) -> Observation:
        shown = observation if self._shown is None else getattr(observation, self._shown)
        return _readable(shown)


ADAPTERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "gymnasium": Gymnasium,
    "skyrl_gym": SkyrlGym,
    "openenv": OpenEnv,
}
"""``environment.adapter`` → class of an episode."""


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _readable(observation: Any) -> Observation:
    if observation is None or isinstance(observation, str):
        return observation
    if isinstance(observation, Sequence) and all(type(item) is int or isinstance(item, Mapping) for item in observation):
        return observation
    return str(observation)
