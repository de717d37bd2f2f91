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


BUILTIN_ENVIRONMENTS = ("guess_number", "calculator", "python")
"""The environments that ship with the package; ``python`` runs what the model writes."""

OUTSIDE = "outside"
"""The name of agents that run elsewhere, and ask for their episodes over HTTP."""


class EnvironmentConfig(Section):
    """Episodes of several turns: the model writes, the environment answers, until it is done. What the model wrote is trained
    on, what the environment wrote is not. Rewards come from the environment; ``reward.weights``, ``failed_reward`` and
    ``max_failed`` apply to them. docs/guides/environments.md has the protocol."""

    name: str
    """``guess_number``, ``calculator``, ``python``, or your own class as ``path/file.py:Class`` or ``package.module:Class``;
    with ``adapter: agent`` a function of yours, or ``outside``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the class is made with, once an episode, as keyword arguments. No place for a secret: a run's folder keeps its
    configuration."""

    adapter: Literal["none", "gymnasium", "skyrl_gym", "openenv", "agent"] = "none"
    """The interface that ``name`` has: ``none`` is this package's; ``agent`` is a function that calls the model over the OpenAI
    protocol (docs/guides/agents.md); the others are those of these libraries (text environments)."""

    agent: AgentConfig | None = None
    """How an agent's requests become an episode, with ``adapter: agent``. null: as by default."""

    max_turns: PositiveInt = 8
    """Turns of the model in an episode, at most; one that is not done by then is cut."""

    max_tokens: PositiveInt | None = None
    """Tokens of an episode behind the prompt, the model's and the environment's together; one that needs more is cut. Default:
    what the model takes. A single turn has ``rollout.sampling.max_new_tokens`` at most."""

    workers: PositiveInt = 1
    """Processes that run environments, beside rank 0 or in each of ``servers``."""

    concurrency: Annotated[int, Field(ge=1, le=65536)] = 256
    """Episodes that a worker has at a time, each with an object of its own; more wait. Lower it where an episode holds much
    memory, or something outside such as a container."""

    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Seconds for one ``reset`` or ``step``; an episode that takes longer in one has failed."""

    memory_mb: PositiveInt = 1024
    """What a worker may take in 10⁶ bytes for all its episodes, beyond what it has once the environment is imported. An episode
    that needs more fails. Linux only."""

    file_mb: PositiveInt = 256
    """The largest file that an environment may write, in 10⁶ bytes."""

    network: bool | None = None
    """Whether environments reach the network, this machine's own addresses included. null: your own do, the built-in ones do
    not. false takes it away where the kernel allows it; ``tepo doctor`` says whether it does."""

    max_restarts: NonNegativeInt = 1
    """How often an episode is begun again that may have been the cause of its worker's end, alone in a worker then; after that
    it has failed. Others that the worker had are begun again anyway."""

    run_code: bool = False
    """Lets ``python`` run programs that the model writes: in a process with limits, without network, in a folder that is
    removed afterwards. It is no virtual machine: what this user may read, such a program may read."""

    servers: tuple[str, ...] = ()
    """Addresses such as http://node7:8400 of ``tepo environment serve``, which run the environments on other machines; episodes
    are spread over them. Default: processes beside rank 0."""

    key_file: Path | None = None
    """The file with the key of ``servers``, as ``tepo environment serve`` wrote it."""

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
                given = "environment.agent" if self.agent is not None else f"environment.name = {OUTSIDE}"
                raise ValueError(f"{given} without environment.adapter = agent; set it")
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
        found = self.model_dump(mode="json", exclude={*where, "agent"})
        if self.adapter == "agent":
            found["agent"] = self.agent_settings.model_dump(mode="json", exclude={"port", "key_file"})
        return found

    @property
    def cuts_network(self) -> bool:
        """Whether environments run without network."""
        if self.adapter == "agent":
            return False
        return not self.network and (self.network is False or ":" not in self.name)
