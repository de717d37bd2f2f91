"""What an environment is: the protocol that a user's class follows (docs/guides/environments.md). Imports no NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tepo_megatron.core.problem import Problem, ResponseText

Message = Mapping[str, Any]
"""A message of a chat: ``{"role": "user" or "tool" or "system", "content": "…"}``, with what else the chat template reads."""

Observation = str | Sequence[int] | Sequence[Message] | None
"""What the model reads next: text, which is encoded as it stands; token ids, which are taken as they are; messages, which the
model's chat template renders; None: nothing."""


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to what the model wrote.

    ``reward``: of this turn alone, a number, or components by name as verifiers return them; an episode's reward is the sum
    over its turns. ``done``: the episode ends, and nothing is read of ``observation``. ``tool_error``: the model used a tool
    wrongly; it is counted (``environment/tool_errors``), and nothing else follows from it.
    """

    observation: Observation = None
    reward: float | Mapping[str, float] = 0.0
    done: bool = False
    tool_error: bool = False
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """For the environment's own use and for adapters; nothing reads it here."""


class Environment(Protocol):
    """One episode. The class is made anew for each, with ``environment.kwargs`` as keyword arguments.

    Each method may be ``async`` or not. A worker process runs many episodes of an ``async`` environment side by side, and one
    call at a time of any other.
    """

    def reset(self, problem: Problem, seed: int) -> Observation | Awaitable[Observation]:
        """Begins. The model reads the problem's prompt, and then what this returns: text or token ids, or None.

        ``seed``: the same for all episodes of a group, so that they begin alike.
        """

    def step(self, action: ResponseText) -> StepResult | Awaitable[StepResult]:
        """The model has written ``action``: a ``str`` that also has its ``token_ids`` and its ``finish_reason``."""
