"""Agents on the real OpenAI client that do what their problem's answer says, for worker processes."""

import contextlib
import time
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError, OpenAI, OpenAIError

from tepo_megatron import Problem

ANSWERS = {"returns nothing": None, "returns text": "0"}

POSTS = {"posts": 0.25, "posts and says": 0.25, "posts text": "good", "posts too much": 1e39, "posts nothing": None}


def solve(problem: Problem, base_url: str, api_key: str) -> Any:
    """Two turns, the second of which goes wrong as the problem's answer says."""
    do = problem.answer
    if do == "asks nothing":
        return 1.0
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": "0"}]
    fields: dict[str, dict[str, Any]] = {
        "another temperature": {"temperature": 0.5},
        "a seed": {"seed": 1},
        "the run's own": {"temperature": 1.0, "top_p": 1, "n": 1, "max_tokens": 2, "user": "u", "frequency_penalty": 0},
    }
    changed = fields.get(do, {})
    try:
        first = client.chat.completions.create(model="any", messages=messages, **changed).choices[0].message
    except BadRequestError:
        return 0.5  # an agent that goes on after an error: its episode has failed all the same
    messages += [first.model_dump(), {"role": "user", "content": "1"}]
    match do:
        case "edits":
            messages[0] = {"role": "user", "content": "3"}
        case "forgets":
            messages = messages[2:]
        case "unknown text":
            messages[2] = {"role": "user", "content": "é"}
        case "too large":
            messages[2] = {"role": "user", "content": "0" * 2_000_000}
        case "never ends":
            while True:
                said = client.chat.completions.create(model="any", messages=messages).choices[0].message
                messages += [said.model_dump(), {"role": "user", "content": "1"}]
        case "raises":
            raise KeyError("gone")
        case "exits":
            raise SystemExit(3)
        case "hangs":
            time.sleep(600)
    try:
        client.chat.completions.create(model="any", messages=messages)
    except BadRequestError:
        return 0.5
    if do in POSTS:
        own = {"Authorization": f"Bearer {api_key}"}
        httpx.post(f"{base_url}/reward", json={"reward": POSTS[do]}, headers=own, timeout=600)
        return 0.75 if do == "posts and says" else None
    return ANSWERS.get(do, 1.0)


def says_its_errors(problem: Problem, base_url: str, api_key: str) -> Any:
    if problem.answer == "asks nothing":
        return 1.0
    client = OpenAI(base_url=base_url, api_key=api_key)
    try:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "0"}])
    except OpenAIError as error:
        print(f"Error getting model response: {error} \n\nExiting...")
        raise
    return 1.0


async def solve_async(problem: Problem, base_url: str, api_key: str, seed: int) -> float:
    """The same in a few turns, streamed; the reward is the part of answers that were whole."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "system", "content": "2"}, {"role": "user", "content": str(seed % 4)}]
    for turn in range(3):
        said = ""
        usage = None
        asked = client.chat.completions.create(
            model="any", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in await asked:
            said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.prompt_tokens > 2 * turn
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": str(turn)}]
    await client.close()
    return 1.0


def runs_on(problem: Problem, base_url: str, api_key: str, seed: int) -> float:
    """Goes on after its episode has ended, but for the first, which ends with it."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    with contextlib.suppress(OpenAIError):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "0"}])
    if seed:
        time.sleep(600)
    return 0.0


def is_not_empty(problem: Problem, response: str) -> float:
    """A verifier, for which "0" is half an answer."""
    return 0.5 if response == "0" else 1.0
