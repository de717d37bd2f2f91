"""``environment.agent``: agents that call the model over the OpenAI protocol."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from tepo_megatron.config.base import Section

Ignorable = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "verbosity",
]
"""Fields of a request that say how the model writes, without which the answer has the same form."""


class AgentConfig(Section):
    """How an agent's requests become an episode: with ``adapter: agent``, whose ``name`` is the agent."""

    history: Literal["fail", "restart"] = "fail"
    """What becomes of an episode whose agent sends another history than what was said (edited, summarised, a second
    conversation). ``fail``: it has failed, with a sentence. ``restart``: it begins anew with these messages, and what was said
    before is not trained on."""

    ignore: tuple[Ignorable, ...] = ()
    """Fields of requests that are ignored, since the run decides on them: for agents that send a temperature of their own, a
    seed, or a response format. All others that would change what the model writes are refused."""

    verifier: str | None = None
    """What rates the last answer where the agent returns no reward: as ``reward.verifier``, a function of one response."""

    chat_template: bool = True
    """Whether messages are rendered by the model's chat template. false: their contents are read as they stand, with nothing
    between them, for models that have no template."""

    tool_calls: Literal["text", "hermes"] = "text"
    """How the model's calls of tools get to the agent. ``text``: as it wrote them. ``hermes``: JSON between ``<tool_call>`` and
    ``</tool_call>``, as Qwen and Hermes models write it, becomes ``tool_calls`` of the message."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the address on loopback that requests go to; 0: any free one, and each of ``environment.workers`` has its own."""

    key_file: Path | None = None
    """The file with the key with which agents outside (``name: outside``) ask for episodes; it is written if it is not
    there."""

    max_request_mb: PositiveInt = 16
    """The largest request in 10⁶ bytes."""

    @model_validator(mode="after")
    def _nothing_is_ignored_twice(self) -> "AgentConfig":
        if len(set(self.ignore)) < len(self.ignore):
            raise ValueError(f"ignore = {', '.join(self.ignore)} names a field twice")
        return self
