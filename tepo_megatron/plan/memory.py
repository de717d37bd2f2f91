"""Bytes on a training rank's GPU and host (docs/reference/plan.md)."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from tepo_megatron.config import RunConfig
from tepo_megatron.plan.shapes import CHECKPOINT_BYTES, ModelSplit, model_parameters, resolve_spec
from tepo_megatron.weights.architecture import ModelSpec

GIB = 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

_SCORE_WORKSPACE = {"cuda": 128 * 2**20, "cpu": 768 * 2**10}

FUSED_HEAD_CHUNK = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}  # bytes of fp32 logits and their gradient; at least 16 tokens

_CUDA_CONTEXT = 1.5 * GIB  # with workspaces of cuBLAS, cuDNN and Transformer Engine: an assumption

_COMMUNICATOR = 0.35 * GIB  # NCCL's buffers per group: an assumption

_VLLM_ASLEEP = 3 * GIB  # an assumption; vLLM's own test allows up to 7 GiB

_IPC_SLOTS = GIB / 8  # at most, for the weights from a training rank; ``weights/transfer/move.py``

BATCH_BYTES_PER_TOKEN = 29  # tokens and labels 8 each, mask 1; three log-probs or entropies 4 each

_FP8_COPIES = 2  # by rows and by columns

PART_ELEMENTS = 2**26  # weights per part in ``trainer/megatron/policy/__init__.py``

_HOST_STATE_BYTES = 20  # fp32 weight and moments 12, pinned gradient 4, which torch rounds up to a power of two

_PROCESS = 6 * GIB  # an assumption


@dataclass(frozen=True)
class _Terms:
    @property
    def terms(self) -> dict[str, float]:
        return asdict(self)

    @property
    def total(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True)
class RankMemory(_Terms):
    """Bytes at the peak of an optimizer step."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    teachers: float  # heads, and layers beyond what a step needs later
    activations: float
    logits: float
    transient: float  # of one layer's or the head's backward pass, or Adam's fp32 copies if they are more
    communication: float
    context: float
    server: float


@dataclass(frozen=True)
class HostMemory(_Terms):
    process: float
    states: float
    turns: float  # what leaves the GPU for colocated servers
    teachers: float  # layers; hidden states for ``distill.of = all``; top tokens of served ones
    staged: float
    routes: float


class TrainingRanks:
    def __init__(self, spec: ModelSpec, config: RunConfig) -> None:
        self.spec, self.config = spec, config
        self.split = ModelSplit(spec, config.engine.parallel)
        self.has_te = config.engine.wants_gpus and config.engine.layers != "local"
        self._kind = "cuda" if config.engine.wants_gpus else "cpu"
        self._parallel, self._element = config.engine.parallel, ELEMENT_BYTES[config.dtype()]
        self._sequence_split = self._parallel.tp if self._parallel.sequence_parallel else 1
        self._norm_copies = 2 if self.has_te else 3  # input and output, with torch also the normalised input
        self.teachers = {
            name: ModelSplit(resolve_spec(teacher.path, f"teachers.{name}.path")[0], config.engine.parallel.even)
            for name, teacher in config.teachers.items()
            if teacher.place == "ranks"
        }
        self._chosen_mlps = spec.experts.per_token if spec.experts else 1
        self.passed_width = self._chosen_mlps * spec.ffn_size + (spec.experts.shared_ffn_size if spec.experts else 0)

    @property
    def tensor_ranks_straddle(self) -> bool:
        """Ranks fill node by node, so that a tensor-parallel group may share no node."""
        return self.config.cluster.train_nodes > 1 and self.config.cluster.gpus_per_node % self._parallel.tp > 0

    @property
    def recomputed(self) -> Collection[str]:
        # every layer counts as one of experts, if the model has some
        return [name for name in self.config.engine.recomputed if name != "mlp" or self.spec.experts is None]

    @property
    def layer_activations(self) -> Mapping[str, float]:
        """Bytes per token; recomputed modules keep their inputs."""
        return self._activations_without(self.recomputed)

    def _activations_without(self, again: Collection[str]) -> Mapping[str, float]:
        spec, parallel, b = self.spec, self._parallel, self._element
        q, k = spec.num_heads * spec.head_dim / parallel.tp, spec.num_kv_heads * spec.head_dim / parallel.tp
        residual, mlp = spec.hidden_size / self._sequence_split, self.passed_width / parallel.tp
        attention_again, mlp_again = "core_attn" in again, "mlp" in again or "moe" in again
        as_rows = not self.has_te and not attention_again  # trainer/megatron/model/attention_cpu.py
        # Transformer Engine has the norm of a dense MLP within it, and discards the output of the norm before experts.
        norm_again = "layernorm" in again or (self.has_te and "mlp" in again)
        return {
            "norms": b * residual * (2 * self._norm_copies - norm_again),
            # fused qkv, and rotated q and k; as rows: q, k and v, with k and v repeated for every query head, and those of all
            # context-parallel ranks
            "attention inputs": b * q * (1 + 2 * parallel.cp) if as_rows else b * (q + 2 * k + q + k),
            "attention output": b * q * (2 if as_rows else 1),
            "log-sum-exp": 0 if attention_again else 4 * spec.num_heads / parallel.tp,
            "rotation": b * 4 * spec.head_dim,
            "gate and up": 0 if mlp_again else b * 2 * mlp,
            # fused: the product alone
            "activated gate, offset up, product": (
                0 if mlp_again or "moe_act" in again else b * (1 if self.has_te else 3) * mlp
            ),
            **({} if "moe" in again else self._routing()),
        }

    def _routing(self) -> Mapping[str, float]:
        # as if all experts got equally many tokens
        spec, tp, b = self.spec, self._parallel.tp, self._element
        if spec.experts is None:
            return {}
        inputs = spec.experts.per_token * self.split.expert_tp * spec.hidden_size
        return {
            "experts' inputs": b * inputs / tp,
            # logits, probabilities of all and of the chosen, in fp32; trainer/megatron/model/model.py's router also its input
            "router": 4 * (3 * spec.experts.count + (0 if self.has_te else spec.hidden_size)) / tp,
            # in the experts' MLP: the factor of the probability
            "weighted product": 0 if self.has_te else b * spec.experts.per_token * spec.ffn_size / tp,
        }

    def padding_share(self, mean_length: float) -> float:
        # half a multiple per micro-batch, and cp tokens per sequence if cp > 1
        cp = self._parallel.cp
        of_sequences = (2 * cp - 1) / 2 / mean_length if cp > 1 else 0.0
        tokens = max(self.config.engine.micro_batch_tokens, mean_length)
        return of_sequences + (self.config.engine.token_multiple - 1) / 2 / tokens

    def micro_batch_tokens(self, longest: int) -> int:
        # A sequence longer than the bound is a micro-batch of its own. All ranks have equally many micro-batches, so that two
        # long sequences may share one if the ranks do not divide their number.
        config, several = self.config, self._parallel.dp * self._parallel.micro_batch_group > 1
        any_number = config.rollout.truncated == "mask" or config.rollout.responses_per_step % config.fewest_sequences > 0
        tokens = max(config.engine.micro_batch_tokens, 2 * longest if several and any_number else longest)
        multiple = config.engine.token_multiple
        return -(-(-(-tokens // multiple) * multiple) // self._parallel.cp)

    def memory(self, stage: int, *, longest: int, step_tokens: float) -> RankMemory:
        spec, config, parallel, b = self.spec, self.config, self._parallel, self._element
        count, trained = self.split.in_stage(stage).total, self.split.in_stage(stage, config.model.lora)
        adapters = trained.total if config.model.lora is not None else 0
        tokens = self.micro_batch_tokens(longest)
        local_tokens = step_tokens / config.train.minibatches / parallel.dp
        local_sequences = -(-config.rollout.responses_per_step // (config.train.minibatches * parallel.dp))
        micro_batches = -(-local_sequences * longest // (tokens * parallel.cp))  # if all are the longest
        logits, transient = self._head_or_layer(stage, tokens)
        owned = self.owned_weights(stage)
        boundary = tokens * b * spec.hidden_size / self._sequence_split
        handed_over = boundary * (self.chunks_in_flight(stage, micro_batches) + 1) if parallel.pp > 1 else 0
        activations = self._activations(stage, tokens, self.layers_in_flight(stage, micro_batches), boundary)
        if (copies := self.step_copies(owned)) > activations + logits + transient:
            activations, logits, transient = 0, 0, copies
        heads, layers = self._teacher_bytes(stage)
        if config.engine.fp8.enabled:
            copies_of = [_FP8_COPIES * split.in_layers(stage).total for split in self.teachers.values()]
            layers = [size + copies for size, copies in zip(layers, copies_of, strict=True)]
        return RankMemory(
            weights=b * (count + adapters) + self._fp8_copies(stage),
            gradients=4 * trained.total,
            optimizer=self.state_bytes * owned,
            # with LoRA the reference is the model itself, without its adapters
            reference=b * count + self._fp8_copies(stage) if config.objective.needs_reference and not adapters else 0,
            teachers=heads + max(0, max(layers, default=0) - activations - logits - transient),
            activations=activations,
            logits=logits,
            transient=transient,
            communication=handed_over
            + step_tokens * BATCH_BYTES_PER_TOKEN * (1 + 2 / config.train.minibatches)
            + local_tokens * 2 * self._top_bytes
            + self._step_routes(local_tokens) / parallel.cp,
            context=_CUDA_CONTEXT + self._communicators() * _COMMUNICATOR if config.engine.wants_gpus else 0,
            server=_VLLM_ASLEEP + min(8, parallel.world_size) * _IPC_SLOTS if config.is_colocated else 0,
        )

    def _teacher_bytes(self, stage: int) -> tuple[float, list[float]]:
        """Returns the bytes of all heads, and of each one's layers."""
        at_end = stage == self._parallel.pp - 1
        heads = [self._element * split.vocabulary * at_end for split in self.teachers.values()]
        whole = [self._element * split.in_stage(stage).total for split in self.teachers.values()]
        return sum(heads), [total - head for total, head in zip(whole, heads, strict=True)]

    def _communicators(self) -> int:
        spec, config, parallel, split = self.spec, self.config, self._parallel, self.split
        copies = parallel.cp * parallel.dp
        apart = config.rollout.replay is None and config.rollout.server.placement != "colocated"
        sizes = {
            "all ranks": parallel.world_size,
            "tensor-parallel": parallel.tp,
            "pipeline": parallel.pp,
            "context-parallel": parallel.cp,
            "data-parallel": parallel.dp if parallel.cp > 1 else 1,
            "copies of the weights": copies,
            "ranks of one copy": parallel.tp * parallel.pp,
            "optimizer's ranks": parallel.world_size if config.optimizer.distributed else 1,
            "tied embeddings": parallel.pp if spec.tied_embeddings else 1,
            "expert-parallel": parallel.ep,
            "expert-tensor-parallel": split.expert_tp if spec.experts else 1,
            "ranks that share experts": parallel.ep * split.expert_tp if parallel.ep > 1 else 1,
            "copies of the experts": split.expert_copies if spec.experts else 1,
            "trainer and servers": 2 if apart else 1,
        }
        return sum(size > 1 for size in sizes.values())

    def owned_weights(self, stage: int) -> float:
        """Counts trained parameters with optimizer states on a rank."""
        trained = self.split.in_stage(stage, self.config.model.lora)
        if not self.config.optimizer.distributed:
            return trained.total
        return trained.dense / (self._parallel.dp * self._parallel.cp) + trained.experts / self.split.expert_copies

    def _fp8_copies(self, stage: int) -> float:
        # FP8 weights use the two bytes of bfloat16
        fp8 = self.config.engine.fp8
        return 0 if not fp8.enabled or fp8.params else _FP8_COPIES * self.split.in_layers(stage).total

    def chunks_in_flight(self, stage: int, micro_batches: float) -> float:
        """Counts the stage's parts with live activations and outputs under (interleaved) 1F1B."""
        parallel = self._parallel
        behind = parallel.pp - stage - 1
        # 1F1B: a stage runs ahead by one micro-batch for each stage behind it. Interleaved, Megatron warms up with two chunks
        # for each stage behind, and one round of all stages for every further chunk.
        chunks = behind + 1 if parallel.vpp == 1 else 2 * behind + (parallel.vpp - 1) * parallel.pp + 1
        return min(chunks, micro_batches * parallel.vpp)

    def layers_in_flight(self, stage: int, micro_batches: float) -> float:
        return len(self.split.stage_layers[stage]) / self._parallel.vpp * self.chunks_in_flight(stage, micro_batches)

    def _activations(self, stage: int, tokens: int, in_flight: float, boundary: float) -> float:
        final_norm = boundary * self._norm_copies if stage == self._parallel.pp - 1 else 0
        retained = sum(self.layer_activations.values())
        if self.config.engine.recompute == "full":
            # Only each layer's input is kept; one layer at a time is computed again, and is then alive as a whole.
            return in_flight * boundary + tokens * retained + final_norm
        recomputed = sum(self._activations_without(()).values()) - retained  # alive for one layer at a time
        return in_flight * (tokens * retained) + tokens * recomputed + final_norm

    def _head_or_layer(self, stage: int, tokens: int) -> tuple[float, float]:
        """Returns bytes of logits and transient, of the head or a larger MLP."""
        spec, parallel, b = self.spec, self._parallel, self._element
        hidden, mlp = spec.hidden_size, spec.ffn_size / (self.split.expert_tp if spec.experts else parallel.tp)
        gathered = b * tokens * hidden
        passing = tokens * self._chosen_mlps * self.split.expert_tp / parallel.tp  # in this rank's MLPs, if evenly routed
        # the input's gradient; gradients of gate, up and their product; the gradient of the fused gate-and-up weight before it
        # is added to the fp32 buffer
        lora = self.config.model.lora
        weights = 1 if lora is None else 2  # with LoRA also the merged weight, which is not kept from the forward pass
        if lora is not None and self.has_te and spec.experts is not None and self.split.in_layers(stage, lora).experts:
            weights *= spec.experts.count // parallel.ep  # those of a grouped linear at once
        layer = b * passing * hidden + b * passing * 3 * mlp + b * hidden * 2 * mlp * weights
        if stage < parallel.pp - 1:
            return 0, layer
        row, weight = b * self.split.vocabulary / hidden, 0 if lora is not None else b * self.split.vocabulary
        if self.config.engine.head == "fused":
            row = row if self.config.dtype() == "float32" else 3 * row  # logits in fp32, their gradient in bf16
            logits = min(tokens, max(16, FUSED_HEAD_CHUNK[self._kind] // row)) * row
            # the scored tokens' inputs and their gradients; the weight's gradient has a placeholder that a CPU never touches
            at_head = 2 * gathered + (weight if self._kind == "cuda" else 0)
        else:
            judges = len(self.teachers) if "divergence" in self.config.objective.needs else 0
            # the gradient is written over the policy's, but not with several teachers
            logits = tokens * row * (judges + 1 + (judges > 1))
            # with sequence parallelism the gathered input and its gradient at once; then the gradient of the head's weight
            at_head = gathered * (2 if parallel.sequence_parallel else 1) + weight
        logits += _SCORE_WORKSPACE[self._kind]
        return (logits, at_head) if logits + at_head > layer else (0, layer)

    @property
    def state_bytes(self) -> float:
        """Per owned weight, on the GPU."""
        optimizer = self.config.optimizer
        master = 0 if self.config.dtype() == "float32" else 2 if optimizer.store_param_remainders else 4
        moments = ELEMENT_BYTES[optimizer.exp_avg_dtype] + ELEMENT_BYTES[optimizer.exp_avg_sq_dtype]
        return (1 - optimizer.offload_fraction) * (master + moments)

    @property
    def host_state_bytes(self) -> float:
        """Per owned weight."""
        return _HOST_STATE_BYTES * self.config.optimizer.offload_fraction

    def step_copies(self, owned: float) -> float:
        # Transformer Engine's Adam makes fp32 copies of reduced states
        spec, optimizer = self.spec, self.config.optimizer
        reduced = sum(dtype != "float32" for dtype in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype))
        gate_and_up = 2 * spec.hidden_size * spec.ffn_size // (self.split.expert_tp if spec.experts else self._parallel.tp)
        return 4 * reduced * min(max(PART_ELEMENTS, self.split.vocabulary, gate_and_up), owned)

    @property
    def checkpoint_bytes(self) -> int:
        return CHECKPOINT_BYTES * model_parameters(self.spec, self.config.model.lora)

    @property
    def rank_checkpoint_bytes(self) -> float:
        return CHECKPOINT_BYTES * max(self.owned_weights(stage) for stage in range(self._parallel.pp))

    @property
    def saves_beside_training(self) -> bool:
        cluster, world = self.config.cluster, self._parallel.world_size
        staged, host = self.checkpoint_bytes * min(world, cluster.gpus_per_node) / world, cluster.host_memory_gib * GIB
        return self.config.train.saves_beside_training(staged, host, on_gpu=self.config.engine.wants_gpus)

    def host_memory(self, stage: int, memory: RankMemory, *, step_tokens: float) -> HostMemory:
        owned = self.owned_weights(stage)
        dropped = self._fp8_copies(stage) * (2 if memory.reference else 1)  # made again from the weights
        return HostMemory(
            process=_PROCESS,
            states=self.host_state_bytes * owned,
            teachers=sum(self._teacher_bytes(stage)[1]) + self._teacher_states(step_tokens) + 2 * step_tokens * self._top_bytes,
            turns=memory.weights + memory.optimizer + memory.reference - dropped if self.config.is_colocated else 0,
            staged=CHECKPOINT_BYTES * owned if self.saves_beside_training else 0,
            routes=2 * self._step_routes(step_tokens),
        )

    def _teacher_states(self, step_tokens: float) -> float:
        if "divergence" not in self.config.objective.needs:
            return 0
        parallel, width = self._parallel, sum(split.spec.hidden_size for split in self.teachers.values())
        return step_tokens * self._element * width / (parallel.dp * parallel.cp * self._sequence_split)

    @property
    def _top_bytes(self) -> int:
        return 8 * self.config.objective.teacher_top_k  # per token: ids and log-probs

    def _step_routes(self, step_tokens: float) -> float:
        return step_tokens * self.spec.route_bytes if self.config.rollout.server.routing_replay else 0

    def root_routes(self, step_tokens: float) -> float:
        """Rank 0 also holds routes of rollouts and of steps sampled ahead."""
        train = self.config.train
        ahead = train.max_staleness + 1 if train.schedule == "overlap" else 0
        return (1 + ahead) * self._step_routes(step_tokens)

    def host_problem(self, hosts: Collection[HostMemory], step_tokens: float) -> str | None:
        """``hosts`` are by stage. Returns a sentence if a node's memory is too small."""
        cluster = self.config.cluster
        ranks, root = min(self._parallel.world_size, cluster.gpus_per_node), self.root_routes(step_tokens)
        most = ranks * max(host.total for host in hosts) + root
        if most <= cluster.host_memory_gib * GIB:
            return None
        replay = ", set rollout.server.routing_replay = false" if root else ""
        return (
            f"{ranks} training ranks on a node need {most / GIB:.0f} GiB of its host's memory, more than "
            f"cluster.host_memory_gib = {cluster.host_memory_gib:g}; set train.async_save = false, lower "
            f"optimizer.offload_fraction{replay}, or train on more nodes"
        )
