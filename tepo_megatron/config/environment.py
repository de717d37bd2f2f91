"""``environment``: what answers the model over several turns, in place of a verifier."""

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
"""Fields of a request that say how the model writes, without which the answer has the same form."""


class AgentConfig(Section):
    """How an agent's requests become an episode: with ``adapter: agent``, whose ``name`` is the agent."""

    history: Literal["fail", "restart"] = "fail"
    """Handling of an agent that sends another history than its conversation (edited, summarised, a second conversation).
    ``fail``: the episode has failed, with a sentence. ``restart``: it starts again with these messages, and earlier turns are
    not trained on."""

    ignore: tuple[Ignorable, ...] = ()
    """Fields of requests that are ignored because the run decides them: for agents that set a temperature, a seed, or a
    response format. Other fields that change the model's output are refused."""

    verifier: str | None = None
    """Rates the last answer if the agent returns no reward: as ``reward.verifier``, a function of one response."""

    chat_template: bool = True
    """Whether messages are rendered by the model's chat template. false: their contents are concatenated, for models without a
    template."""

    tool_calls: Literal["text", "hermes"] = "text"
    """Form of the model's tool calls in answers. ``text``: as written. ``hermes``: JSON between ``<tool_call>`` and
    ``</tool_call>``, as Qwen and Hermes models write it, becomes ``tool_calls`` of the message."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on loopback for requests; 0: any free one, and each of ``environment.workers`` has its own."""

    key_file: Path | None = None
    """File with the key of agents outside (``name: outside``); written if it does not exist."""

    max_request_mb: PositiveInt = 16
    """The largest request in 10⁶ bytes."""

    @model_validator(mode="after")
    def _nothing_is_ignored_twice(self) -> "AgentConfig":
        if len(set(self.ignore)) < len(self.ignore):
            raise ValueError(f"ignore = {', '.join(self.ignore)} names a field twice")
        return self


BUILTIN_ENVIRONMENTS = ("guess_number", "calculator", "python")
"""The environments that ship with the package; ``python`` runs what the model writes."""

OUTSIDE = "outside"
"""The name of agents that run elsewhere, and ask for their episodes over HTTP."""


class EnvironmentConfig(Section):
    """Episodes of several turns: the model writes, the environment answers, until it is done. Tokens of the model are trained
    on, those of the environment are not. Rewards come from the environment; ``reward.weights``, ``failed_reward`` and
    ``max_failed`` apply to them. docs/guides/environments.md has the protocol."""

    name: str
    """``guess_number``, ``calculator``, ``python``, or a custom class as ``path/file.py:Class`` or ``package.module:Class``;
    with ``adapter: agent`` a custom function, or ``outside``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, which is made once per episode. Not for secrets: a run's folder keeps its
    configuration."""

    adapter: Literal["none", "gymnasium", "skyrl_gym", "openenv", "agent"] = "none"
    """Interface of ``name``: ``none`` is this package's; ``agent`` is a function that calls the model over the OpenAI protocol
    (docs/guides/agents.md); the others are those of these libraries (text environments)."""

    agent: AgentConfig | None = None
    """How an agent's requests become an episode, with ``adapter: agent``. null: the defaults."""

    max_turns: PositiveInt = 8
    """Most turns of the model in an episode; a longer one is cut."""

    max_tokens: PositiveInt | None = None
    """Most tokens of an episode after the prompt, the model's and the environment's together; a longer one is cut. Default: the
    model's limit. A single turn has ``rollout.sampling.max_new_tokens`` at most."""

    workers: PositiveInt = 1
    """Processes that run environments, next to rank 0 or in each of ``servers``."""

    concurrency: Annotated[int, Field(ge=1, le=65536)] = 256
    """Concurrent episodes of a worker, each with its own object; more wait. Lower it if an episode needs much memory, or
    something outside such as a container."""

    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Seconds for one ``reset`` or ``step``; an episode that needs more has failed."""

    memory_mb: PositiveInt = 1024
    """Memory of a worker for all its episodes, in 10⁶ bytes, beyond its memory after the import of the environment. An episode
    that needs more fails. Linux only."""

    file_mb: PositiveInt = 256
    """The largest file that an environment may write, in 10⁶ bytes."""

    network: bool | None = None
    """Whether environments reach the network, this machine's own addresses included. null: custom ones do, built-in ones do
    not. false removes it if the kernel allows it; ``tepo doctor`` tells."""

    max_restarts: NonNegativeInt = 1
    """Restarts of an episode that may have ended its worker, alone in a worker then; after that it has failed. Other episodes
    of the worker are restarted in any case."""

    run_code: bool = False
    """Lets ``python`` run programs that the model writes: in a process with limits, without network, in a folder that is
    removed afterwards. It is no virtual machine: such a program may read what this user may read."""

    servers: tuple[str, ...] = ()
    """Addresses of ``tepo environment serve``, such as http://node7:8400, which run the environments on other machines;
    episodes are spread over them. Default: processes next to rank 0."""

    key_file: Path | None = None
    """File with the key of ``servers``, as ``tepo environment serve`` wrote it."""

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
        """``agent``, or its defaults."""
        return self.agent or AgentConfig()

    def decides(self) -> dict[str, Any]:
        """What of it decides how an episode goes, as JSON values."""
        where = {"workers", "concurrency", "servers", "key_file", "max_restarts"}
        result = self.model_dump(mode="json", exclude={*where, "agent"})
        if self.adapter == "agent":
            result["agent"] = self.agent_settings.model_dump(mode="json", exclude={"port", "key_file"})
        return result

    @property
    def cuts_network(self) -> bool:
        """Whether environments run without network."""
        if self.adapter == "agent":
            return False
        return not self.network and (self.network is False or ":" not in self.name)
