"""The protocol of user-defined environments (docs/guides/environments.md). Imports no NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tepo_megatron.core.problem import Problem, ResponseText

Message = Mapping[str, Any]
"""A chat message: ``{"role": "user" or "tool" or "system", "content": "…"}``, with further keys that the chat template
reads.
"""

Observation = str | Sequence[int] | Sequence[Message] | None
"""What the model reads next: text, encoded without special tokens; token ids, unchanged; messages, rendered by the chat
template; None: nothing.
"""


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a turn.

    ``reward``: of this turn, a number or components by name; an episode's reward is the sum over its turns. ``done``: the
    episode ends, and ``observation`` is ignored. ``tool_error``: the model used a tool wrongly, which is only counted
    (``environment/tool_errors``).
    """

    observation: Observation = None
    reward: float | Mapping[str, float] = 0.0
    done: bool = False
    tool_error: bool = False
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """For the environment and adapters; not read here."""


class Environment(Protocol):
    """One episode. The class is instantiated for each, with ``environment.kwargs``. Methods may be ``async``: a worker process
    then runs many episodes concurrently.
    """

    def reset(self, problem: Problem, seed: int) -> Observation | Awaitable[Observation]:
        """Begins the episode. Returns what the model reads after the problem's prompt: text, token ids or None. ``seed`` is
        the same for all episodes of a group.
        """

    def step(self, action: ResponseText) -> StepResult | Awaitable[StepResult]:
        """The model has written ``action``: a ``str`` with ``token_ids`` and ``finish_reason``."""
