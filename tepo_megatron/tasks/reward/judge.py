import asyncio
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import httpx

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.text import parse_json

_PROMPT = """Question:
{prompt}

Reference answer:
{answer}

Response to grade:
{response}

Is the final answer of the response the same as the reference answer? Think briefly, then end with a line "Score: 1" if it is, \
"Score: 0" if it is not."""

_PATTERN = r"Score:\s*(?:(-?\d+(?:\.\d+)?)(?!\.?\d|\s*/))?"  # also what is no score, so that the last one counts

_BUSY = (408, 409, 425, 429)
_LONGEST_PAUSE_S = 30.0


class JudgeError(RuntimeError):
    """The response counts as failed, not as wrong."""


class Judge:
    """Asks a model to score each response; a worker has up to ``reward.concurrency`` requests open.

    A missing or cut reply, a status other than 200 or a reply without a score raises ``JudgeError``. Transient errors (no
    connection, status 408, 409, 425, 429 or 5xx) are retried ``retries`` times, after 0.5, 1, 2, … seconds or as the server
    asks; ``reward.timeout_s`` limits all tries. Each worker remembers the last ``cache`` replies.

    Args:
        base_url: up to ``/v1``, without user or password.
        prompt: the question, with ``{prompt}``, ``{answer}`` and ``{response}``.
        pattern: a regular expression; the first group of its last match is the score.
        api_key_env: environment variable with the key, which is never shown.
        timeout_s: seconds of one try.
        body: more fields of a request, such as ``{"top_p": 0.9}``.

    Raises:
        ValueError: an invalid address, or an unset variable.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        prompt: str = _PROMPT,
        pattern: str = _PATTERN,
        api_key_env: str | None = None,
        max_tokens: int = 512,
        temperature: float = 0.0,
        timeout_s: float = 30.0,
        retries: int = 3,
        cache: int = 10_000,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if "@" in base_url:
            raise ValueError("base_url holds a user or a password; leave them out, and name a variable with api_key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url = {base_url!r} is no address; write one such as http://127.0.0.1:8000/v1")
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._key = "" if api_key_env is None else os.environ.get(api_key_env, "")
        if api_key_env is not None and not self._key:
            raise ValueError(
                f"api_key_env names the environment variable {api_key_env}, which is not set; set it where rank 0 runs"
            )
        self._prompt, self._pattern = prompt, re.compile(pattern)
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **(body or {})}
        self._retries, self._most = retries, cache
        self._replies: OrderedDict[bytes, str] = OrderedDict()
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy cannot reach this machine's own addresses.
        trust_env = parts.hostname not in ("localhost", "127.0.0.1", "::1")
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers, trust_env=trust_env)

    async def score(self, problem: Problem, response: ResponseText) -> float:
        """Override it if the score is one component of several."""
        chat = "\n\n".join(f"{role}: {content}" for role, content in problem.messages)
        prompt = chat if len(problem.messages) > 1 else problem.prompt
        values = {"prompt": prompt, "answer": problem.answer, "response": str(response)}
        # Not str.format: the prompt may have other braces, and inserted text must not be parsed.
        question = re.sub(r"\{(prompt|answer|response)\}", lambda match: values[match[1]], self._prompt)
        reply = await self.ask(question)
        score = None
        with suppress(TypeError, ValueError):  # no match, an optional group, or no number
            *_, last = self._pattern.finditer(reply)
            score = float(last[1 if self._pattern.groups else 0])
        if score is None or (self._prompt == _PROMPT and not 0 <= score <= 1):
            self._replies.pop(_key(question), None)
            shown = self._shown(reply)
            raise JudgeError(f"the judge's reply has no score that it was asked for ({self._pattern.pattern}): {shown!r}")
        return score

    async def ask(self, question: str) -> str:
        """The reply may be remembered. Raises JudgeError if all tries fail."""
        key = _key(question)
        if key in self._replies:
            self._replies.move_to_end(key)
            return self._replies[key]
        last = ""
        try:
            for number in range(self._retries + 1):
                try:
                    answer = await self._client.post(
                        self._url, json={**self._body, "messages": [{"role": "user", "content": question}]}
                    )
                except httpx.TransportError as error:
                    last, pause_s = self._shown(f"{type(error).__name__} {error}".strip()), 0.0
                else:
                    if answer.status_code == 200:
                        return self._read(key, answer)
                    last, pause_s = f"status {answer.status_code}: {self._shown(answer.text)}", _pause_s(answer)
                    if answer.status_code not in _BUSY and answer.status_code < 500:
                        break
                if number < self._retries:
                    await asyncio.sleep(pause_s or 0.5 * 2**number)
        except asyncio.CancelledError:
            if not last:
                raise
            raise JudgeError(f"the judge at {self._url} gave no reply in reward.timeout_s; its last: {last}") from None
        raise JudgeError(f"the judge at {self._url} gave no reply: {last}")

    def _read(self, key: bytes, answer: httpx.Response) -> str:
        try:
            choice = parse_json(answer.content, "it")["choices"][0]
            reply, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (ValueError, KeyError, IndexError, TypeError):
            reply, cut = None, False
        if cut and self._pattern.pattern == _PATTERN:  # the instruction to end with a score may be all that it has repeated
            limit = self._body["max_tokens"]
            raise JudgeError(f"the judge's reply was cut at max_tokens = {limit}, raise it: {self._shown(str(reply))!r}")
        if not isinstance(reply, str):
            raise JudgeError(f"the judge at {self._url} gave no reply: no chat completion: {self._shown(answer.text)}")
        self._replies[key] = reply
        while len(self._replies) > self._most:
            self._replies.popitem(last=False)
        return reply

    def _shown(self, text: str) -> str:
        text = text.replace(self._key, "***") if self._key else text
        return text if len(text) <= 200 else f"{text[:200]}…"


def _key(question: str) -> bytes:
    return blake2b(question.encode(), digest_size=16).digest()  # questions themselves would fill gigabytes


def _pause_s(answer: httpx.Response) -> float:
    try:
        return min(max(float(answer.headers.get("retry-after", 0)), 0.0), _LONGEST_PAUSE_S)
    except ValueError:  # a date
        return 0.0
