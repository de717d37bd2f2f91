"""``environment``: answers the model over several turns, instead of a verifier."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

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
"""Fields of a request that do not change the form of the answer."""


class AgentConfig(Section):
    """How an agent's requests become an episode, with ``adapter: agent`` and the agent as ``name``."""

    history: Literal["fail", "restart"] = "fail"
    """If an agent changes its conversation's history (edits, summaries, a second conversation). ``fail``: the episode fails.
    ``restart``: it starts again with these messages; earlier turns are not trained on."""

    ignore: tuple[Ignorable, ...] = ()
    """Request fields to ignore, such as temperature or seed, because the run decides them. Others that change the output are
    refused."""

    verifier: str | None = None
    """Rates the last answer if the agent returns no reward: as ``reward.verifier``, of one response."""

    chat_template: bool = True
    """Render messages with the model's chat template. false: concatenate contents, for models without one."""

    tool_calls: Literal["text", "hermes"] = "text"
    """Tool calls in answers. ``text``: as written. ``hermes``: JSON between ``<tool_call>`` and ``</tool_call>`` (Qwen, Hermes)
    becomes ``tool_calls`` of the message."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Loopback port for requests; 0: any free one, one per worker of ``environment.workers``."""

    key_file: Path | None = None
    """Key of agents outside (``name: outside``); written if missing."""

    max_request_mb: PositiveInt = 16
    """Largest request, in 10⁶ bytes."""

    @model_validator(mode="after")
    def _nothing_is_ignored_twice(self) -> "AgentConfig":
        if len(set(self.ignore)) < len(self.ignore):
            raise ValueError(f"ignore = {', '.join(self.ignore)} names a field twice")
        return self


BUILTIN_ENVIRONMENTS = ("guess_number", "calculator", "python")
"""The built-in environments; ``python`` runs programs of the model."""

OUTSIDE = "outside"
"""Agents that run elsewhere and ask for episodes over HTTP."""


class EnvironmentConfig(Section):
    """Episodes of several turns: the model writes, the environment answers, until done. Only the model's tokens are trained
    on. The environment gives rewards; ``reward.weights``, ``failed_reward`` and ``max_failed`` apply
    (docs/guides/environments.md)."""

    name: str
    """``guess_number``, ``calculator``, ``python``, or a custom class: ``path/file.py:Class`` or ``package.module:Class``; with
    ``adapter: agent`` a custom function, or ``outside``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, made once per episode. No secrets: the run's folder keeps its configuration."""

    adapter: Literal["none", "gymnasium", "skyrl_gym", "openenv", "agent"] = "none"
    """Interface of ``name``: ``none`` is this package's; ``agent`` a function that calls the model by the OpenAI protocol
    (docs/guides/agents.md); the others are those libraries' (text environments)."""

    agent: AgentConfig | None = None
    """Settings for ``adapter: agent``. null: the defaults."""

    max_turns: PositiveInt = 8
    """Most turns of the model per episode; a longer one is cut."""

    max_tokens: PositiveInt | None = None
    """Most tokens of an episode after the prompt; a longer one is cut. Default: the model's limit. A turn has at most
    ``rollout.sampling.max_new_tokens``."""

    workers: PositiveInt = 1
    """Processes that run environments, next to rank 0 or in each of ``servers``."""

    concurrency: Annotated[int, Field(ge=1, le=65536)] = 256
    """Concurrent episodes per worker, each with its own object; more wait. Lower it if episodes need much memory or, for
    example, a container."""

    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Seconds per ``reset`` or ``step``; an episode that needs more fails."""

    memory_mb: PositiveInt = 1024
    """A worker's memory for all its episodes, in 10⁶ bytes, beyond that after the import. An episode that needs more fails.
    Linux only."""

    file_mb: PositiveInt = 256
    """Largest file that an environment may write, in 10⁶ bytes."""

    network: bool | None = None
    """Network access, this machine included. null: only for custom environments. false removes it if the kernel allows; ``tepo
    doctor`` tests that."""

    max_restarts: NonNegativeInt = 1
    """Restarts, alone in a worker, of an episode that may have ended its worker; then it fails. Its other episodes always
    restart."""

    run_code: bool = False
    """Lets ``python`` run the model's programs: in a limited process, without network, in a temporary folder. This is no
    virtual machine: they may read what this user may read."""

    servers: tuple[str, ...] = ()
    """Addresses of ``tepo environment serve``, such as http://node7:8400, on other machines; episodes are spread over them.
    Default: processes next to rank 0."""

    key_file: Path | None = None
    """Key of ``servers``, as ``tepo environment serve`` wrote it."""

    @field_validator("servers")
    @classmethod
    def _addresses_are_http(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        for url in servers:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address of an environment server; give one such as http://127.0.0.1:8400")
        return servers

    @model_validator(mode="after")
    def _there_is_a_key(self) -> "EnvironmentConfig":
        if self.servers and self.key_file is None:
            raise ValueError(
                "environment.servers needs environment.key_file: the file with the key that 'tepo environment serve' wrote"
            )
        return self

    @model_validator(mode="after")
    def _code_is_run_knowingly(self) -> "EnvironmentConfig":
        if self.name == "python" and not self.run_code:
            raise ValueError(
                "environment.name = python runs programs that the model writes; set environment.run_code = true if you mean it"
            )
        if self.name == "python" and self.network:
            raise ValueError("environment.name = python has no network; leave environment.network out")
        return self

    @model_validator(mode="after")
    def _agents_are_agents(self) -> "EnvironmentConfig":
        if self.adapter != "agent":
            if self.agent is not None or self.name == OUTSIDE:
                name = "environment.agent" if self.agent is not None else f"environment.name = {OUTSIDE}"
                raise ValueError(f"{name} without environment.adapter = agent; set it")
            return self
        if self.name in BUILTIN_ENVIRONMENTS:
            raise ValueError(f"environment.name = {self.name} is an environment, and no agent; leave environment.adapter out")
        if self.network is False:
            raise ValueError("environment.network = false with adapter = agent: an agent reaches the model over this machine's")
        settings = self.agent_settings
        if self.workers > 1 and settings.port:
            raise ValueError(
                f"environment.workers = {self.workers} cannot share environment.agent.port = {settings.port}; leave one of the "
                "two out"
            )
        if self.name == OUTSIDE and (settings.port == 0 or settings.key_file is None):
            raise ValueError(
                f"environment.name = {OUTSIDE} needs environment.agent.port and environment.agent.key_file, with which agents "
                "ask for episodes"
            )
        return self

    @property
    def agent_settings(self) -> AgentConfig:
        return self.agent or AgentConfig()

    def decides(self) -> dict[str, Any]:
        """Settings that decide how an episode goes, as JSON values."""
        where = {"workers", "concurrency", "servers", "key_file", "max_restarts"}
        result = self.model_dump(mode="json", exclude={*where, "agent"})
        if self.adapter == "agent":
            result["agent"] = self.agent_settings.model_dump(mode="json", exclude={"port", "key_file"})
        return result

    @property
    def cuts_network(self) -> bool:
        if self.adapter == "agent":
            return False
        return not self.network and (self.network is False or ":" not in self.name)
