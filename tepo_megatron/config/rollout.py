"""``rollout``: how responses are sampled, and by which servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from tepo_megatron.config.base import Seconds, Section, check_known


class _SpeculativeConfig(Section):
    """Speculative decoding: n-grams or a draft model guess tokens. The distribution of samples stays."""

    num_speculative_tokens: PositiveInt = 4
    """Most tokens guessed at a time."""

    draft_model: Path | None = None
    """Folder of a smaller Hugging Face model with the policy's vocabulary, never updated. Default: n-grams."""

    prompt_lookup_min: PositiveInt = 2
    """Shortest n-gram looked up, in tokens."""

    prompt_lookup_max: PositiveInt = 4
    """Longest n-gram looked up, in tokens; the longest match counts."""

    def _faults(self) -> Iterator[str]:
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least > most:
            yield f"prompt_lookup_min = {least} is above prompt_lookup_max = {most}, so that nothing is looked for; lower it"
        for name in self._changed("prompt_lookup_max", "prompt_lookup_min") if self.draft_model is not None else ():
            yield f"{name} is for n-grams, and draft_model guesses here; leave one of the two out"


_SIZES = (
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
    *("--prefill-context-parallel-size", "-pcp"),
)


class ServerConfig(Section):
    placement: Literal["local", "colocated", "external"] = "local"
    """``local``: the trainer starts servers on its machine's free GPUs. ``colocated``: on its own GPUs, in turns, on one
    machine. ``external``: by ``tepo serve``, listed in ``registry``; ``tepo launch`` sets both.
    """

    registry: Path | None = None
    """Shared folder of external servers' addresses and the run's key."""

    interface: str | None = None
    """Network interface for external servers, such as ib0. Default: the host name's."""

    count: PositiveInt = 1
    """Servers; they share the prompts."""

    tp: PositiveInt = 1
    """Tensor-parallel size."""

    host: str = "127.0.0.1"
    """Address for local servers, no wildcard. Whoever has the run's key can change the weights there."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """First port to try; 0: the system chooses."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The servers' dtype; ``auto`` is ``model.dtype``."""

    quantization: Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] = "none"
    """vLLM's online quantisation, scaled by tensor, output channel or 128 × 128 block. Needs bfloat16."""

    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of logits. ``model``: ``dtype``. ``float32``: not rounded, as with a fused head. Not run on a GPU yet."""

    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and response. Default: the model's limit."""

    max_num_seqs: PositiveInt = 512
    """Most sequences a server decodes at once."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of a GPU's memory for an awake server; ``engine.gpu_memory_fraction`` bounds the trainer."""

    cpu_kv_cache_gib: PositiveInt = 1
    """KV cache of CPU workers, in GiB."""

    cpu_threads: str = "auto"
    """Without GPU: cores of each worker as in ``VLLM_CPU_OMP_THREADS_BIND``, such as ``0-3`` or ``0|1`` for two workers.
    ``auto``: one each. ``all``: workers share all, for ``train.schedule = sync``.
    """

    load_format: Literal["auto", "dummy", "model"] = "auto"
    """A server's first weights. ``dummy``: meaningless, until the first update. ``model``: those of ``model.path``. ``auto``:
    ``dummy`` in training and tepo serve, if transfer is ``reshard`` (which fills every parameter) without draft model; else
    ``model``.
    """

    start_timeout_s: Seconds = 900.0
    """Seconds from a server's start to its first answer: usually 15 to 60, more with slow disks or compilation."""

    request_timeout_s: Seconds = 300.0
    """Seconds without an answer or token before a server is restarted; above 300 also vLLM's limit for a step."""

    max_retries: NonNegativeInt = 3
    """Retries of a request after invalid answers, if possible elsewhere. More in a row restart the server."""

    transfer: Literal["reshard", "gather"] = "reshard"
    """``reshard``: trainer ranks send shards to workers. ``gather``: rank 0 broadcasts full tensors, of any model."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """Transport of shards. ``gloo``: sockets, through host memory. ``nccl``: between separate GPUs. ``ipc``: within a colocated
    GPU, to others by NCCL through the trainer's rank there. ``auto``: ``gloo`` if the trainer is on a CPU or shares a GPU with
    a server, ``ipc`` if colocated, else ``nccl``. NCCL: not run on a GPU yet.
    """

    transfer_timeout_s: Seconds = 120.0
    """Seconds for a message of a weight update; then it fails."""

    max_restarts: NonNegativeInt = 3
    """Failures in a run, over all servers; one more stops it. A failed update is one."""

    speculative: _SpeculativeConfig | None = None
    """Speculative decoding; ``{}``: n-grams. Default: none. Not run on a GPU yet."""

    routing_replay: bool = False
    """Servers return each token's experts (layers × experts per token bytes), which the trainer replays in scores and updates
    (docs/reference/moe.md). With ``rollout.replay``, recorded rollouts need them.
    """

    extra_args: tuple[str, ...] = ()
    """Further arguments of ``vllm.entrypoints.openai.api_server``."""

    def served_dtype(self, model_dtype: str) -> str:
        return model_dtype if self.dtype == "auto" else self.dtype

    @property
    def longest_wait_s(self) -> float:
        """Seconds that a weight update may wait for servers, restart included."""
        return self.start_timeout_s + self.request_timeout_s + self.transfer_timeout_s

    @property
    def drafts(self) -> bool:
        return self.speculative is not None and self.speculative.draft_model is not None

    def starts_with_dummies(self, *, trained: bool) -> bool:
        """``trained``: a weight update precedes their first sample."""
        own_format = any(item.split("=")[0] == "--load-format" for item in self.extra_args)
        if self.load_format == "auto":
            return trained and self.transfer == "reshard" and not own_format and not self.drafts
        return self.load_format == "dummy"

    @field_validator("host")
    @classmethod
    def _no_wildcard(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::"):  # noqa: S104
            raise ValueError(f"{host!r} is no address that trainer and servers can reach; name one of this machine's")
        return host

    def argument_among(self, *names: str) -> str | None:
        """Returns the first of ``extra_args`` with one of these names, which vLLM takes with underscores too."""
        present = (item.split("=")[0].replace("_", "-") for item in self.extra_args)
        return next((name for name in present if name in names), None)

    def _faults(self) -> Iterator[str]:
        if (size := self.argument_among("--gpu-memory-utilization", "--max-model-len", "--max-num-seqs")) is not None:
            yield f"extra_args has {size}, which no plan reads; set {size.strip('-').replace('-', '_')} instead"
        if self.load_format == "dummy" and self.transfer == "gather":
            yield "load_format = dummy needs transfer = reshard, which fills every parameter; set load_format = model"
        if self.quantization != "none" and self.drafts:
            yield f"quantization = {self.quantization} with speculative.draft_model has not been tested; leave one out"
        overrides = next((item for item in self.extra_args if item.replace("_", "-").startswith("--hf-overrides")), None)
        if self.head_dtype != "model" and overrides is not None:
            yield (
                f"head_dtype = {self.head_dtype} with {overrides.split('=')[0]} in extra_args: vLLM takes one of the two; put "
                '"head_dtype": "float32" into the overrides'
            )
        if self.load_format == "dummy" and self.drafts:
            yield "load_format = dummy would fill the draft model with dummies too, whose weights no update brings; set auto"
        if self.placement == "external" and self.registry is None:
            yield "placement = external needs registry: a folder that all nodes share, such as OUT/servers"
        if self.placement != "external" and self.registry is not None:
            yield f"placement = {self.placement}, but registry is for external ones; set registry = null, or external"
        if self.routing_replay and self.speculative is not None:
            yield "routing_replay = true with speculative, whose rejected guesses have experts too; leave one of the two out"
        if self.transport not in ("auto", "gloo") and self.transfer == "gather":
            yield f"transport = {self.transport} is for transfer = reshard; gather broadcasts over gloo"
        if self.transport == "ipc" and self.placement != "colocated":
            yield (
                f"transport = ipc needs trainer and servers on the same GPUs, not placement = {self.placement}; set "
                "transport = nccl, or placement = colocated"
            )
        if self.transport == "nccl" and self.placement == "colocated":
            yield "transport = nccl needs a GPU for each of its ranks, and placement = colocated has none; set transport = ipc"


MOST_KEPT = 1024
"""Limit on ``top_k`` in training: servers name all candidates of every token."""


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 512
    """Most tokens of a response; a longer one is cut."""

    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Also divides the trainer's logits. vLLM raises values below 0.01, and refuses values above 2."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that reach this probability; 1: all (docs/reference/truncated-sampling.md)."""

    top_k: PositiveInt | None = None
    """Draw from this many likeliest tokens; default: all. Training with ``top_p``, ``min_p`` or ``bad_words`` needs it."""

    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw from tokens with this fraction of the likeliest one's probability; 0: all. Training needs ``top_k``."""

    stop: tuple[str, ...] = ()
    """Strings that end a response (reason ``stop``) with the token that completes them, which stays."""

    bad_words: tuple[str, ...] = ()
    """Strings not to draw, tokenized with and without leading space. Training needs ``top_k``."""

    @property
    def truncates(self) -> bool:
        """If some tokens cannot be drawn, the others' probabilities rise."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0 or bool(self.bad_words)

    @property
    def needs_tokenizer(self) -> bool:
        return bool(self.stop or self.bad_words)

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_strings(cls, strings: tuple[str, ...]) -> tuple[str, ...]:
        if not all(strings):
            raise ValueError("one of the strings is empty, and would be found everywhere; leave it out")
        return strings


NAMED_FILTERS = ("zero_variance", "too_long", "reward_range")


class _FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): filtered groups are not trained on; further prompts fill the batch."""

    filters: tuple[str, ...] = ("zero_variance",)
    """In this order; all must accept a group. ``zero_variance`` refuses equal rewards, ``too_long`` more than ``max_truncated``
    cut responses, ``reward_range`` a mean reward outside it; or a custom ``(group: Sequence[Rollout]) -> bool``, true to
    accept: ``path/file.py:function``. They see the verifier's rewards, without ``overlong``.
    """

    max_batches: PositiveInt = 10
    """Most prompts of a step, in units of ``prompts_per_step``; then the run stops. verl: ``max_num_gen_batches``."""

    max_truncated: Annotated[float, Field(ge=0, lt=1)] | None = None
    """For ``too_long``: largest share of a group's responses cut at ``max_new_tokens``."""

    reward_range: tuple[float, float] | None = None
    """For ``reward_range``: smallest and largest mean reward; (0.1, 0.9) drops groups (almost) always or never solved."""

    @field_validator("filters")
    @classmethod
    def _filters_are_known(cls, filters: tuple[str, ...]) -> tuple[str, ...]:
        if not filters:
            raise ValueError("filters is empty, so that nothing is filtered; leave filter_groups out")
        check_known(filters, NAMED_FILTERS, "filter", "(group) -> bool")
        return filters

    def _faults(self) -> Iterator[str]:
        for name, field in (("too_long", "max_truncated"), ("reward_range", "reward_range")):
            if (name in self.filters) != (getattr(self, field) is not None):
                missing = f"the filter {name} needs {field}" if name in self.filters else f"{field} is for the filter {name}"
                yield f"{missing}; give both, or neither"
        if self.reward_range is not None and self.reward_range[0] > self.reward_range[1]:
            yield f"reward_range = {list(self.reward_range)} holds no number; give the smaller one first"


class _OverlongConfig(Section):
    """DAPO's soft overlong punishment, subtracted from rewards of responses close to ``max_new_tokens``."""

    buffer: PositiveInt
    """Tokens before ``max_new_tokens`` over which the punishment grows from 0; DAPO: 4096 of 20480."""

    penalty: Annotated[float, Field(gt=0, le=1e15)] = 1.0  # as core.problem.LARGEST_REWARD
    """Subtracted from a cut response's reward; 1 in DAPO, with rewards −1 and 1."""


class _CanaryConfig(Section):
    """Stops the run if servers score a prompt after a weight sync, or rollouts, unlike the trainer."""

    every: NonNegativeInt = 1
    """Weight syncs between checks; rollouts: every step. 0: never."""

    tolerance: PositiveFloat | None = None
    """Largest difference of a token's log-prob, in nats. Default: by coarser dtype (docs/reference/numerics.md)."""

    rollouts_tolerance: PositiveFloat | None = None
    """Largest mean log-prob difference over a group, in nats. Default: below ``tolerance``'s, as means vary less."""


class RolloutConfig(Section):
    prompts_per_step: PositiveInt = 64
    """Prompts, and so groups of responses, per step."""

    samples_per_prompt: PositiveInt = 8
    """G, responses per prompt."""

    filter_groups: _FilterGroupsConfig | None = None
    """Dynamic sampling: train on groups that pass filters."""

    oversample: Annotated[float, Field(ge=1, le=2)] = 1.0
    """Groups started per missing group, with ``filter_groups`` or ``partial``: less waiting. The next step uses the surplus."""

    partial: bool = False
    """Unfinished responses continue in the next step. Needs ``oversample`` above 1. The seed repeats no such run."""

    truncated: Literal["train", "mask", "penalise"] = "train"
    """Responses cut at ``max_new_tokens``. ``train``: as others. ``mask``: no loss on their tokens; rewards still count in the
    group (DAPO's overlong filtering). ``penalise``: ``overlong`` lowers rewards of long ones.
    """

    overlong: _OverlongConfig | None = None
    """For ``truncated: penalise``."""

    collect: str | None = None
    """Replaces the draws of a step, as best-of-n: ``(problems, sampler) -> rollouts`` as ``path/file.py:function``."""

    sampling: SamplingConfig = SamplingConfig()
    server: ServerConfig = ServerConfig()
    canary: _CanaryConfig = _CanaryConfig()
    uncorrected: bool = False
    """Allow samples of quantised servers or older weights without ``objective.mismatch``."""

    journal: bool = True
    """Write a step's rewarded rollouts to ``<output>/journal/`` until no resume needs them."""

    record: bool = False
    """Write and keep rollouts in ``<output>/rollouts/``."""

    replay: Path | None = None
    """Read rollouts from this folder of ``record``; no server starts."""

    replay_weights: Literal["same", "any"] = "same"
    """``same``: the record's first weights must be this run's, by digest. ``any``: others are trained on, off-policy."""

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def trains_on(self, finish_reason: str) -> bool:
        return self.truncated != "mask" or finish_reason != "length"

    def check_room(
        self, prompts: Iterable[tuple[int, str]], limit: float, new: int | None = None, owner: str = "rollout"
    ) -> None:
        """``prompts``: tokens and the problem's id. ``owner`` has its own ``new``. Raises ValueError."""
        new = self.sampling.max_new_tokens if new is None else new
        longest, problem = max(prompts)
        if longest + new > limit:
            bound = "" if self.server.max_model_len is None else " (rollout.server.max_model_len)"
            advice = f"lower max_new_tokens to {max(1, limit - longest)} or less"
            if new < limit:  # else no prompt is short enough
                advice += f", or set data.max_prompt_tokens={limit - new}"
            raise ValueError(
                f"the prompt of problem {problem!r} ({longest} tokens) and {owner}.sampling.max_new_tokens = {new} exceed the "
                f"{limit} tokens that the model takes{bound}; {advice}"
            )

    def _faults(self) -> Iterator[str]:
        if self.replay is None and (size := self.server.argument_among(*_SIZES)) is not None:
            yield f"server.extra_args has {size}, and weight updates number workers by server.tp and count; set those instead"
        if self.replay_weights != "same" and self.replay is None:
            yield f"replay_weights = {self.replay_weights} has no effect without replay; leave it out"
        if self.oversample > 1 and self.filter_groups is None and not self.partial:
            yield (
                f"oversample = {self.oversample:g} begins more groups than a step trains on; set filter_groups or partial, or "
                "leave it out"
            )
        if self.partial and self.oversample == 1:
            yield "partial = true, but oversample = 1 begins no more groups than a step needs; set oversample = 1.5"
        if self.samples_per_prompt == 1 and self.filter_groups is not None and "zero_variance" in self.filter_groups.filters:
            yield "filter_groups.filters: zero_variance refuses each group of one response; set samples_per_prompt = 2 or more"
        if self.collect is not None and (self.filter_groups is not None or self.oversample > 1 or self.partial):
            yield f"collect = {self.collect} decides what is trained on; leave filter_groups, oversample and partial out"
        if (self.truncated == "penalise") != (self.overlong is not None):
            yield f"truncated = {self.truncated} and overlong belong together: truncated = penalise needs overlong.buffer"
        if self.overlong is not None and self.overlong.buffer > self.sampling.max_new_tokens:
            yield (
                f"overlong.buffer = {self.overlong.buffer} is more than sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}, so that even an empty response would be punished; lower it"
            )
        if self.partial and self.sampling.needs_tokenizer:
            yield "partial = true with sampling.stop or sampling.bad_words, which may be in two parts; leave one of the two out"

    def shard_faults(self) -> Iterator[str]:
        """If servers get merged weights."""
        experts = self.server.argument_among("--enable-expert-parallel", "-ep")
        if experts is not None and self.server.transfer == "reshard" and self.replay is None:
            yield (
                f"rollout.server.extra_args has {experts}, and shards are of experts split by tp; set "
                "rollout.server.transfer = gather"
            )

    def _training_faults(self) -> Iterator[str]:
        if not self.sampling.truncates:
            return
        sampling, top_k = self.sampling, self.sampling.top_k
        limit = f"a server names every token that could have been drawn, at most {MOST_KEPT}"
        if top_k is None:
            field = "bad_words" if sampling.bad_words else f"min_p = {sampling.min_p:g}"
            field = f"top_p = {sampling.top_p:g}" if sampling.top_p < 1 else field
            yield f"sampling.{field} without sampling.top_k: {limit}; set sampling.top_k = 100"
        elif top_k > MOST_KEPT:
            yield f"sampling.top_k = {top_k}: {limit} of them; lower it, or leave it out with top_p, min_p and bad_words"
        elif self.server.speculative is not None:
            yield f"sampling.top_k = {top_k} with server.speculative has not been tested; leave one of the two out"
