"""An agent's episode: requests one after another, each answered once by the model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from tepo_megatron.core.problem import ResponseText
from tepo_megatron.tasks.environments.agents.chat_requests import (
    ChatAnswer,
    ChatRequest,
    Conversation,
    ParsedRequest,
    RefusedError,
    completion,
    read_answer,
    same_messages,
)

OVER = "the episode is over"


class EpisodeError(Exception): ...


@dataclass(frozen=True)
class AgentEnd:
    result: Any = None
    error: BaseException | None = None


@dataclass
class _Turn:
    asked: ParsedRequest
    answer: asyncio.Future[dict[str, Any]]
    waiting: int = 0


@dataclass(eq=False)
class AgentSession:
    """Connects an agent (:meth:`ask`) with the driver of its episode (:meth:`wait`, :meth:`give`). Used from one event loop.

    A refused request fails the episode: an agent that continues after an error would be rewarded for something else.
    """

    history: Literal["fail", "restart"]
    tool_calls: str
    reward_ends: bool = False
    posted: Any = None
    malformed: bool = False
    _conversation: Conversation = field(default_factory=Conversation)
    _turn: _Turn | None = None
    _ask: ChatRequest | None = None
    _ended: AgentEnd | None = None
    _failure: str | None = None
    _closed: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    # -- the agent's side --------------------------------------------------------------------------------------------------

    async def ask(self, asked: ParsedRequest, *, again: bool) -> dict[str, Any]:
        """``again``: the client repeats the request and receives the same answer. Raises RefusedError."""
        turn = self._begun(asked, again=again) or self._begin(asked)
        turn.waiting += 1
        try:
            return await asyncio.shield(turn.answer)
        finally:
            turn.waiting -= 1

    def refuse(self, sentence: str) -> None:
        self._failure = self._failure or sentence
        self._news.set()

    def _begun(self, asked: ParsedRequest, *, again: bool) -> _Turn | None:
        if self._closed or self._ended is not None or self._failure is not None:
            raise RefusedError(
                OVER if self._failure is None else f"the episode has failed: {self._failure}", code="episode_over"
            )
        turn = self._turn
        same = turn is not None and asked.tools == turn.asked.tools and same_messages(turn.asked.messages, asked.messages)
        if turn is None or (turn.answer.done() and not (same and again)):
            return None
        if same and (again or not turn.waiting):
            return turn
        raise RefusedError(
            "the agent asks again before it was answered; an episode is one conversation, so have it wait for each answer",
            code="one_at_a_time",
        )

    def _begin(self, asked: ParsedRequest) -> _Turn:
        new = self._conversation.new(asked.messages, asked.tools)
        begins = not self._conversation.said
        if new is None:
            if self.history == "fail":
                why = self._conversation.why_not(asked.messages, asked.tools)
                raise RefusedError(
                    f"the agent sent another history than what was said: {why}; an episode is trained on as one sequence, so "
                    "send what was said and the new messages behind it, or set environment.agent.history = restart to train "
                    "on the last conversation alone",
                    code="other_history",
                    param="messages",
                )
            new, begins = asked.messages, True
        self._conversation.heard(asked.messages, asked.tools)
        tools = None if asked.tools is None or not begins else tuple(asked.tools)
        self._ask = ChatRequest(tuple(new), begins, tools, asked.max_tokens)
        self._turn = _Turn(asked, asyncio.get_running_loop().create_future())
        self._news.set()
        return self._turn

    def post(self, reward: Any) -> None:
        self.posted = reward
        if self.reward_ends:
            self.end(AgentEnd())

    def end(self, ended: AgentEnd) -> None:
        if self._ended is None:
            self._ended = ended
            self._news.set()

    # -- the other side ----------------------------------------------------------------------------------------------------

    async def wait(self) -> ChatRequest | AgentEnd:
        """Raises EpisodeError for a refused request."""
        while self._ask is None and self._ended is None and self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise EpisodeError(self._failure)
        if self._ended is not None:
            return self._ended
        assert self._ask is not None
        ask, self._ask = self._ask, None
        return ask

    def give(self, action: ResponseText) -> None:
        turn = self._turn
        assert turn is not None, "nothing was asked"
        answer: ChatAnswer = read_answer(action, self.tool_calls)
        self.malformed = answer.malformed
        self._conversation.answered(answer.message)
        if not turn.answer.done():
            turn.answer.set_result(completion(turn.asked, answer, action))

    def close(self) -> None:
        self._closed = True
        turn = self._turn
        if turn is not None and not turn.answer.done():
            if turn.waiting:
                turn.answer.set_exception(RefusedError(OVER, code="episode_over"))
            else:
                turn.answer.cancel()
