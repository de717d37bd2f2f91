"""``reward`` and ``environment``: what scores a response, or answers it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Section


class RewardConfig(Section):
    verifier: str = "last_word"
    """``last_word``, ``exact``, ``last_number``, ``math`` (math-verify), ``judge`` (a model behind an OpenAI-compatible
    address), ``python_tests`` (runs program and tests in a sandbox), ``stack_machine`` (likewise), or ``(problem, response) ->
    float`` as ``path/file.py:function`` or ``package.module:function``. Others: docs/guides/rewards.md. A reward of 1 or more
    is correct.
    """

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a verifier class, made once per worker. No secrets: the run's folder keeps them."""

    weights: dict[str, float] | None = None
    """Weights of exactly the components that the verifier returns. null: 1 each."""

    workers: PositiveInt = 1
    """Verifier processes, next to rank 0. More if many time out."""

    concurrency: Annotated[int, Field(ge=1, le=128)] = 16
    """Concurrent calls per worker of an ``async`` verifier; others run one by one."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds per response, or per group for group verifiers; then it fails."""

    memory_mb: PositiveInt = 512
    """A verifier's memory beyond that of its import (and ``__init__``), in 10⁶ bytes. Linux only."""

    file_mb: PositiveInt = 256
    """Largest file a verifier may write, in 10⁶ bytes."""

    network: bool | None = None
    """Network access. null: only for ``judge`` and custom verifiers. false cuts it if the kernel allows (``tepo doctor``)."""

    run_code: bool = False
    """Lets ``python_tests`` run the model's programs, limited and without network. They may read this user's files."""

    failed_reward: Annotated[float, Field(ge=-1e15, le=1e15)] | None = None  # as core.problem.LARGEST_REWARD
    """Reward after an exception, a non-finite result, or a passed limit. null: the response leaves its group."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of a step's responses that may fail; beyond, or with too few left, the run stops."""

    def _faults(self) -> Iterator[str]:
        if self.weights == {}:
            yield "weights = {} names no component; name one, or leave it out"
        yield from filter(None, map(self.component_fault, self.weights or ()))

    @property
    def cuts_network(self) -> bool:
        asks = ":" in self.verifier or self.verifier == "judge"
        return not self.network and (self.network is False or not asks)

    @staticmethod
    def component_fault(name: Any) -> str | None:
        """Returns None if this can name a component, whose metric is ``reward/<name>``."""
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 60:
            may = "a name has letters, digits and underscores, 60 at most"
            return f"{str(name)[:60]!r} cannot name a component of a reward: {may}"
        if name in ("mean", "std", "failed", "overlong"):
            return f"a component cannot be called {name}, since reward/{name} is a metric of its own; choose another name"
        return None


_Draws = Literal["temperature", "top_p", "top_k", "min_p", "stop", "seed", "max_tokens", "max_completion_tokens"]
_Penalties = Literal["frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"]
_Forms = Literal["response_format", "tool_choice", "parallel_tool_calls", "reasoning_effort", "verbosity"]
Ignorable = Literal[_Draws, _Penalties, _Forms]
"""Fields of a request without which the answer has the same form."""


class AgentConfig(Section):
    """How requests become an episode, with ``adapter: agent`` and the agent as ``name``."""

    history: Literal["fail", "restart"] = "fail"
    """If an agent changes its history: the episode fails, or restarts, without training on earlier turns."""

    ignore: tuple[Ignorable, ...] = ()
    """Request fields to ignore, such as temperature or seed. Others that change output are refused."""

    verifier: str | None = None
    """Rates the last answer if the agent returns no reward: as ``reward.verifier``, of one response."""

    chat_template: bool = True
    """false: concatenate messages instead."""

    tool_calls: Literal["text", "hermes"] = "text"
    """``text``: as written. ``hermes``: JSON between ``<tool_call>`` tags (Qwen) becomes ``tool_calls``."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Loopback port for requests; 0: any, one per worker."""

    key_file: Path | None = None
    """Key of agents outside (``name: outside``); written if missing."""

    max_request_mb: PositiveInt = 16
    """Largest request, in 10⁶ bytes."""

    def _faults(self) -> Iterator[str]:
        if len(set(self.ignore)) < len(self.ignore):
            yield f"ignore = {', '.join(self.ignore)} names a field twice"


BUILTIN_ENVIRONMENTS = ("guess_number", "calculator", "python")

OUTSIDE = "outside"  # agents elsewhere ask for episodes over HTTP


PROGRAMS_AT_ONCE, PROGRAM_SECONDS = 16, 5.0  # per worker of the environment python; its default of seconds


class EnvironmentConfig(Section):
    """Episodes of several turns; only the model's tokens are trained on. The environment gives rewards; ``reward.weights``,
    ``failed_reward`` and ``max_failed`` apply.
    """

    name: str
    """``guess_number``, ``calculator``, ``python``, or ``path/file.py:Class``; for agents a function, or ``outside``."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, made once per episode. No secrets: the run's folder keeps them."""

    adapter: Literal["none", "gymnasium", "skyrl_gym", "textarena", "openenv", "agent"] = "none"
    """Interface of ``name``: ``none`` is ours; an ``agent`` (docs/guides/agents.md) calls the model by HTTP."""

    agent: AgentConfig | None = None
    """Settings for ``adapter: agent``."""

    observations: Literal["auto", "user", "tool", "text"] = "auto"
    """Role of the environment's text where prompts are messages; ``text``: none, behind the model's. ``auto``: ``tool`` for
    ``calculator`` and ``python``, ``text`` with ``special_tokens``, otherwise ``user``.
    Text of ``reset`` continues the prompt's last message.
    """

    max_turns: PositiveInt = 8
    """Most turns per episode; a longer one is cut."""

    max_tokens: PositiveInt | None = None
    """Most tokens after the prompt; a longer episode is cut. Default: the model's limit."""

    workers: PositiveInt = 1
    """Environment processes, next to rank 0 or in each of ``servers``."""

    concurrency: Annotated[int, Field(ge=1, le=65536)] = 256
    """Concurrent episodes per worker. Lower: less memory."""

    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 10.0
    """Seconds per ``reset`` or ``step``; then the episode fails."""

    memory_mb: PositiveInt = 1024
    """A worker's memory for all episodes after the import, in 10⁶ bytes. Linux only."""

    file_mb: PositiveInt = 256
    """Largest file an environment may write, in 10⁶ bytes."""

    network: bool | None = None
    """As ``reward.network``; null: only for custom environments."""

    max_restarts: NonNegativeInt = 1
    """Restarts, alone in a worker, of an episode that may have ended its worker."""

    special_tokens: bool = False
    """Special tokens' names in an environment's text become these tokens. false: plain text."""

    run_code: bool = False
    """Allows ``python``, as ``reward.run_code`` does."""

    servers: tuple[str, ...] = ()
    """Addresses of ``tepo environment serve``, such as http://node7:8400. Default: next to rank 0."""

    key_file: Path | None = None
    """``tepo environment serve`` writes this key of ``servers``."""

    @property
    def role(self) -> str | None:
        """Of text between messages; None: it stays text."""
        if self.observations != "auto":
            return None if self.observations == "text" else self.observations
        if self.special_tokens or self.adapter == "agent":
            return None
        return "tool" if self.name in ("calculator", "python") else "user"

    @property
    def call_limit_s(self) -> float:
        """``timeout_s``, and for ``python`` the longest wait for a place."""
        if self.name != "python":
            return self.timeout_s
        seconds = self.kwargs.get("seconds")
        seconds = seconds if isinstance(seconds, int | float) else PROGRAM_SECONDS  # its own message comes when it is made
        return self.timeout_s + (self.concurrency - 1) // PROGRAMS_AT_ONCE * (1.0 + seconds)  # 1: to start

    def _faults(self) -> Iterator[str]:
        for url in self.servers:
            if not url.startswith(("http://", "https://")):
                yield f"servers: {url!r} is no address of an environment server; give one such as http://127.0.0.1:8400"
        if self.servers and self.key_file is None:
            yield "environment.servers needs environment.key_file: the file with the key that 'tepo environment serve' wrote"
        if self.name == "python" and not self.run_code:
            yield "environment.name = python runs the model's programs; set environment.run_code = true if you mean it"
        if self.name == "python" and self.network:
            yield "environment.name = python has no network; leave environment.network out"
        if self.special_tokens and self.adapter == "agent" and self.agent_settings.chat_template:
            yield "environment.special_tokens = true is for text, and messages never have any; leave it out"
        if self.special_tokens and self.role is not None:
            yield f"special_tokens = true with observations = {self.observations}: messages never have any; leave one out"
        if self.adapter == "agent" and self.observations != "auto":
            yield f"environment.observations = {self.observations} with adapter = agent, which sends messages; leave it out"
        if self.adapter != "agent":
            if self.agent is not None or self.name == OUTSIDE:
                name = "environment.agent" if self.agent is not None else f"environment.name = {OUTSIDE}"
                yield f"{name} without environment.adapter = agent; set it"
            return
        if self.name in BUILTIN_ENVIRONMENTS:
            yield f"environment.name = {self.name} is an environment, and no agent; leave environment.adapter out"
        if self.network is False:
            yield "environment.network = false with adapter = agent: an agent reaches the model over this machine's"
        settings = self.agent_settings
        if self.workers > 1 and settings.port:
            yield f"environment.workers = {self.workers} cannot share environment.agent.port = {settings.port}; leave one out"
        if self.name == OUTSIDE and (settings.port == 0 or settings.key_file is None):
            yield f"environment.name = {OUTSIDE} needs environment.agent.port and environment.agent.key_file, for the agents"

    @property
    def agent_settings(self) -> AgentConfig:
        return self.agent or AgentConfig()

    def decides(self) -> dict[str, Any]:
        """JSON values of what decides how an episode goes."""
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
