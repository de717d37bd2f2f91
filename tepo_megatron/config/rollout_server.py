"""``rollout.server``: the vLLM servers that sample."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tepo_megatron.config.base import Seconds, Section


class SpeculativeConfig(Section):
    """Speculative decoding: n-grams or a draft model guess the next tokens, and the model checks all guesses in one pass. The
    distribution of samples stays the same, the samples do not. Pays if guesses are good and few sequences are decoded at a
    time."""

    num_speculative_tokens: PositiveInt = 4
    """Most tokens guessed at a time. Wrong guesses cost time."""

    draft_model: Path | None = None
    """Folder of a smaller Hugging Face model with the policy's vocabulary. Weight updates do not change it, so its guesses get
    worse. Default: n-grams."""

    prompt_lookup_min: PositiveInt = 2
    """Shortest n-gram looked up, in tokens."""

    prompt_lookup_max: PositiveInt = 4
    """Longest n-gram looked up, in tokens; the longest match is used."""

    @model_validator(mode="after")
    def _lengths_are_a_range(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min = {self.prompt_lookup_min} is above prompt_lookup_max = {self.prompt_lookup_max}, so that "
                "nothing would be looked for; set it lower"
            )
        return self

    @model_validator(mode="after")
    def _one_of_the_two_guesses(self) -> "SpeculativeConfig":
        fields = type(self).model_fields  # a complete configuration (resolved.yaml) names the defaults too
        raw = [name for name in ("prompt_lookup_max", "prompt_lookup_min") if getattr(self, name) != fields[name].default]
        if self.draft_model is not None and raw:
            raise ValueError(f"{raw[0]} is for n-grams, and draft_model guesses here; leave one of the two out")
        return self


class ServerConfig(Section):
    placement: Literal["local", "colocated", "external"] = "local"
    """``local``: the trainer starts servers on free GPUs of its machine. ``colocated``: on its own GPUs, in turns, on one
    machine; not run on a GPU yet. ``external``: by ``tepo serve``, listed in ``registry``; ``tepo launch`` sets both for runs
    with rollout nodes."""

    registry: Path | None = None
    """Folder on a disk that all nodes share, with the external servers' addresses and the run's key."""

    interface: str | None = None
    """Interface of the nodes' inner network that external servers listen on, such as ib0. Default: the address of the node's
    host name."""

    count: PositiveInt = 1
    """Servers; prompts are spread over them."""

    tp: PositiveInt = 1
    """Tensor-parallel size of each server."""

    host: str = "127.0.0.1"
    """Address of this machine for local servers, no wildcard. Anyone who reaches it with the run's key can change the
    weights."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """First port to try; the next free one is used. 0: the system chooses."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations in the servers; ``auto`` is ``model.dtype``."""

    quantization: Literal["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"] = "none"
    """vLLM's online quantisation of the linear weights, with a scale per tensor, output channel or block of 128 × 128. Needs
    dtype bfloat16."""

    max_model_len: PositiveInt | None = None
    """Largest length of prompt and response together, in tokens. Default: the limit of the model's config."""

    max_num_seqs: PositiveInt = 512
    """Most sequences that a server decodes at once; more wait."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Fraction of each GPU's memory that an awake server uses; ``engine.gpu_memory_fraction`` bounds the trainer."""

    cpu_kv_cache_gib: PositiveInt = 1
    """KV cache memory of a worker without GPU, in GiB."""

    cpu_threads: str = "auto"
    """Without GPU: cores of each worker as in ``VLLM_CPU_OMP_THREADS_BIND``, such as ``0``, ``0-3`` or ``0|1`` for two workers.
    ``auto``: one each. ``all``: workers share all cores, for ``train.schedule = sync``."""

    load_format: Literal["auto", "dummy", "model"] = "auto"
    """A server's first weights. ``dummy``: meaningless numbers; it samples only after the trainer has sent weights. ``model``:
    those of ``model.path``, read by every server. ``auto``: ``dummy`` in training and tepo serve, if transfer is ``reshard``
    (whose plan fills every parameter) and there is no draft model; else ``model``."""

    start_timeout_s: Seconds = 900.0
    """Seconds from a server's start to its first answer: usually 15 to 60. It bounds only a hanging server, since an end is
    noticed at once. A slow disk or compiling kernels may need more."""

    request_timeout_s: Seconds = 300.0
    """Seconds without an answer, or while sampling without any new token; then the server is restarted. A response may take
    longer. The default is vLLM's limit for one step of its workers."""

    max_retries: NonNegativeInt = 3
    """Retries of a sample request, on another server if possible, after an invalid answer (malformed, status 5xx, broken
    connection). More failures in a row restart the server; 0: at once."""

    transfer: Literal["reshard", "gather"] = "reshard"
    """How weights reach the servers. ``reshard``: trainer ranks send their shards straight to the workers. ``gather``: rank 0
    gathers and broadcasts each full tensor, for models without a vLLM entry in ``weights/layouts``."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """Transport of shards. ``gloo``: sockets, through host memory. ``nccl``: between separate GPUs. ``ipc``: within a colocated
    GPU; other shards go by NCCL through the trainer's rank there. ``auto``: ``gloo`` if the trainer is on a CPU or shares a GPU
    with a server, ``ipc`` if colocated, else ``nccl``. NCCL and IPC have not been run on a GPU yet."""

    transfer_timeout_s: Seconds = 120.0
    """Seconds for one message of a weight update; after them the update fails."""

    max_restarts: NonNegativeInt = 3
    """Restarts in a run, over all servers, after death, hanging or wrong answers. The next one stops the run, with the first
    cause."""

    speculative: SpeculativeConfig | None = None
    """Speculative decoding; ``{}``: n-grams with the defaults. Default: none. Not run on a GPU yet."""

    routing_replay: bool = False
    """Servers return each token's experts, which the trainer replays in scores and updates (docs/reference/moe.md). Costs
    layers × experts per token bytes per token. With ``rollout.replay`` recorded rollouts must have them."""

    extra_args: tuple[str, ...] = ()
    """Further arguments of ``vllm.entrypoints.openai.api_server``, as on its command line."""

    def served_dtype(self, model_dtype: str) -> str:
        """``dtype`` for a trainer in ``model_dtype``, with ``auto`` resolved."""
        return model_dtype if self.dtype == "auto" else self.dtype

    @property
    def longest_wait_s(self) -> float:
        """Seconds that a weight update may wait for servers, restart included."""
        return self.start_timeout_s + self.request_timeout_s + self.transfer_timeout_s

    @property
    def drafts(self) -> bool:
        """Whether a draft model guesses; no update brings its weights."""
        return self.speculative is not None and self.speculative.draft_model is not None

    def starts_with_dummies(self, *, trained: bool) -> bool:
        """Whether servers read no weights. ``trained``: a weight update comes before their first sample."""
        own_format = any(item.split("=")[0] == "--load-format" for item in self.extra_args)
        if self.load_format == "auto":
            return trained and self.transfer == "reshard" and not own_format and not self.drafts
        return self.load_format == "dummy"

    @field_validator("host")
    @classmethod
    def _no_wildcard(cls, host: str) -> str:
        if host in ("", "0.0.0.0", "::"):  # noqa: S104
            raise ValueError(
                f"{host!r} is no address that trainer and servers can reach each other at; name one of this machine's"
            )
        return host

    @model_validator(mode="after")
    def _dummy_weights_are_all_replaced(self) -> "ServerConfig":
        if self.load_format == "dummy" and self.transfer == "gather":
            raise ValueError(
                "load_format = dummy needs transfer = reshard, whose plan proves that every parameter is filled; with "
                "transfer = gather what no tensor brings would stay as it is: set load_format = model"
            )
        if self.quantization != "none" and self.drafts:
            raise ValueError(
                f"quantization = {self.quantization} with speculative.draft_model has not been tested; leave one of the two out"
            )
        if self.load_format == "dummy" and self.drafts:
            raise ValueError(
                "load_format = dummy with speculative.draft_model: vLLM would fill the draft model with dummies too, and no "
                "update brings its weights; set load_format = auto"
            )
        return self

    @model_validator(mode="after")
    def _external_servers_need_a_registry(self) -> "ServerConfig":
        if self.placement == "external" and self.registry is None:
            raise ValueError("placement = external needs registry: a folder that all nodes share, such as OUT/servers")
        if self.placement == "colocated" and self.registry is not None:
            raise ValueError(
                "placement = colocated starts the servers on the trainer's GPUs, but registry is for external ones; leave "
                "registry out, or set placement = external"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_those_of_drawn_tokens(self) -> "ServerConfig":
        if self.routing_replay and self.speculative is not None:
            raise ValueError(
                "routing_replay = true with speculative: the experts of guesses that the model rejects would stand between "
                "those of drawn tokens; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _transport_fits_the_placement(self) -> "ServerConfig":
        if self.transport not in ("auto", "gloo") and self.transfer == "gather":
            raise ValueError(f"transport = {self.transport} is for transfer = reshard; gather broadcasts over gloo")
        if self.transport == "ipc" and self.placement != "colocated":
            raise ValueError(
                f"transport = ipc needs trainer and servers on the same GPUs, but placement = {self.placement} puts them "
                "apart; set transport = nccl, or placement = colocated"
            )
        if self.transport == "nccl" and self.placement == "colocated":
            raise ValueError(
                "transport = nccl needs a GPU for each of its ranks, and with placement = colocated trainer and servers share "
                "theirs; set transport = ipc"
            )
        return self
