"""Faults in a vLLM worker that no digest sees: which check stops the run, at which size of error.

The program (``… FOLDER SERVER``) is a trainer and a server with a faulty worker; it answers lines of JSON.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.run.consistency_checks import CACHED_TOKENS, Canary, Tolerances
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tools.bench.recipes import llama, make_model
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome
from tepo_megatron.tools.results import Child


@dataclass(frozen=True)
class _SilentFault:
    """``param``: end of parameters' names (empty: all). ``scales``: the error's size is variable."""

    name: str
    kind: str
    param: str = ""
    server: Literal["dense", "dense bf16", "experts", "two workers"] = "dense"
    scales: bool = True
    syncs: int = 1


SILENT_FAULTS: tuple[_SilentFault, ...] = (
    _SilentFault("halves of gate/up swapped in one MLP", "swap halves", "layers.1.mlp.gate_up_proj.weight"),
    _SilentFault("an update that never took place, and says it did", "stale"),
    _SilentFault("a stale prefix cache", "stale cache", scales=False),
    _SilentFault("a wrong temperature in the sampler", "temperature"),
    _SilentFault("a rotary buffer lost (sleep level 2)", "buffer lost"),
    _SilentFault("one layer not loaded", "stale", "layers.2."),
    _SilentFault("weights of the step before, at every step", "one behind"),
    _SilentFault("a wrong rotary base", "rotary base"),
    _SilentFault("a square weight transposed", "transpose", "layers.1.self_attn.o_proj.weight"),
    _SilentFault("two query heads exchanged", "exchange heads", "layers.0.self_attn.qkv_proj.weight"),
    _SilentFault("a norm's weight zeroed in one layer", "zero", "layers.3.input_layernorm.weight"),
    _SilentFault("rows of the head beyond a boundary of the vocabulary stale", "stale rows", "lm_head.weight"),
    _SilentFault("an update that never took place, without its label", "no label", scales=False),
    _SilentFault("halves of gate/up swapped in one expert", "swap halves of an expert", "experts.w13_weight", "experts"),
    _SilentFault("a tied head not updated", "stale head", "embed_tokens.weight", "experts"),
    _SilentFault("one worker of two stale", "stale in worker 1", "", "two workers"),
)  # in the order of --quick; those of other servers come last


_SIZES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
_CONTROL = _SilentFault("no fault: no check may stop the run", "none", scales=False)
ALL: tuple[_SilentFault, ...] = (
    _CONTROL,
    *SILENT_FAULTS,
    replace(_CONTROL, name=f"{_CONTROL.name} (bf16)", server="dense bf16"),
    replace(_CONTROL, name="no fault in 200 syncs, a GPU's noise (bf16)", kind="noise", server="dense bf16", syncs=200),
    *(replace(fault, name=f"{fault.name} (bf16)", server="dense bf16") for fault in SILENT_FAULTS if fault.server == "dense"),
)
CHECKS = ("transfer", "read back", "prompt", "version", "cache", "rollouts")


class _SilentFaults(FaultClass):
    name = "silent"
    title = "wrong weights, buffers, caches or temperature in a vLLM worker, behind the digests"
    whole, quick = len(ALL), 4
    _world: Child | None = None
    _server = ""

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        fault = ALL[number % len(ALL)]
        if self._world is None or self._server != fault.server:
            self.close()
            self.workshop.say(f"a trainer and a server: {fault.server} …")
            arguments = ["-m", __name__, str(self.folder), fault.server]
            self._world, self._server = Child(arguments, self.folder / "log.txt", OMP_NUM_THREADS="1"), fault.server
        sizes = _SIZES if fault.scales and not self.workshop.is_quick else _SIZES[:1]
        try:
            return judge(fault, self._world.ask({**asdict(fault), "sizes": sizes}))
        except RuntimeError as error:
            self.close()
            raise RuntimeError(f"the trainer and its server {error}; {self.folder / 'log.txt'} says more") from error

    def close(self) -> None:
        if self._world is not None:
            self._world.close()  # ends the server too
            self._world = None


def judge(fault: _SilentFault, result: Sequence[dict[str, Any]]) -> FaultOutcome:
    smallest = {check: min((item["size"] for item in result if check in item["caught"]), default=None) for check in CHECKS}
    word, said = _verdict(fault, result[0])
    return FaultOutcome(fault.name, word, said, details={"smallest": smallest, "found": result})


def _verdict(fault: _SilentFault, whole: dict[str, Any]) -> tuple[Literal["survived", "refused", "lost"], str]:
    caught = whole["caught"]
    if "transfer" in caught:  # these faults come after the transfer
        return "lost", f"the weight update itself failed: {caught['transfer']}"
    if fault.kind in ("none", "noise"):
        return ("lost", f"a false alarm: {'; '.join(caught.values())}") if caught else ("survived", "")
    if caught:
        by = ", ".join(check for check in CHECKS if check in caught)
        return "refused", f"caught by {by}: {next(iter(caught.values()))[:300]}"
    clean, values = whole["clean"], whole["figures"]
    figures = ", ".join(f"{name} {value:.1e} (without a fault {clean[name]:.1e})" for name, value in values.items())
    return "lost", f"no check saw it: {figures}"


FAULTS: tuple[type[FaultClass], ...] = (_SilentFaults,)

_EXPERTS = {
    **llama(2, 64, 64, 96, 4, 2),
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 64, "head_dim": 32},
    **{"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"max_position_embeddings": 256, "tie_word_embeddings": True, "rope_theta": 10000.0},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_SAMPLES, _NEW_TOKENS = 4, 24


class _World:
    def __init__(self, folder: Path, server: str) -> None:
        from tepo_megatron.trainer.megatron.engine import Engine

        worker = ["--worker-extension-cls", "tepo_megatron.tools.faults.in_worker.FaultyWorker"]
        self.config = RunConfig.model_validate(
            {
                "model": {"dtype": "bfloat16" if "bf16" in server else "float32"},
                "engine": {"layers": "local"},  # Transformer Engine takes no float32
                "optimizer": {"lr": 5e-5, "warmup_steps": 0},
                "rollout": {
                    "sampling": {"temperature": 0.9},
                    "server": {"tp": 2 if server == "two workers" else 1, "extra_args": worker},
                },
            }
        )
        model = folder / "experts" if server == "experts" else resolve_model_path("builtin:tiny")
        if not (model / "config.json").exists():
            make_model(model, _EXPERTS, std=0.12, dtype=torch.float32)
        self.engine = Engine(self.config, model)
        self.sender = make_shard_sender(self.config, self.engine.weights)
        spec = self.engine.spec
        self.prompt = Canary.prompt(spec.vocab_size, spec.max_positions)
        self.cached = Canary.cached_prompt(spec.vocab_size, spec.max_positions)
        tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
        self.prompts = [tuple(tokenizer.prompt_ids(item.prompt)) for item in load_problems("builtin:addition-heldout")[:8]]
        options: dict[str, Any] = {"dtype": self.config.model.dtype, "stop_token_ids": tokenizer.eos_ids, "log_dir": folder}
        self.fleet = Fleet(self.config.rollout.server, model_dir=model, **options)
        self.fleet.start()
        self.updates, self.first_gap, self.drift = 0, 0.0, 0.0
        self.weights = [self._copy()]
        self.fault("none")
        self._update(0)
        self.engine.update(self._sample())
        self.weights.append(self._copy())
        self._update(1)
        self.clean: dict[str, float] = self._ask(Canary(Tolerances.of(self.config).token))["figures"]

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.engine.policy.params.items()}

    def _update(self, which: int) -> None:
        with torch.no_grad():
            for name, param in self.engine.policy.params.items():
                param.copy_(self.weights[which][name])
        self.updates += 1
        self.fleet.update_weights_from_shards(self.engine.weights.version(self.updates), self.sender)

    def fault(self, kind: str, param: str = "", scale: float = 1.0) -> None:
        for client in self.fleet._clients:
            fault = json.dumps({"kind": kind, "param": param, "scale": scale})
            client._post("/collective_rpc", {"method": "tepo_fault", "args": [fault]})

    def _sample(self) -> Batch:
        sampling = self.config.rollout.sampling
        groups = self.fleet.generate(
            self.prompts, n=_SAMPLES, temperature=sampling.temperature, max_new_tokens=_NEW_TOKENS, seed=self.updates
        )
        rollouts = [
            Rollout.of(
                response, problem_id=str(group), group=group, prompt_ids=self.prompts[group], text="", reward=float(index % 2)
            )
            for group, responses in enumerate(groups)
            for index, response in enumerate(responses)
        ]
        return self.engine.score(self.engine.batch_from_root(rollouts))

    def measure(self, fault: Mapping[str, Any], size: float) -> dict[str, Any]:
        canary = Canary(Tolerances.of(self.config).token)
        self.fault("none")
        self._update(0)
        self._ask(canary)
        self.drift = 0.0
        self.fault(fault["kind"], fault["param"], size)
        for number in range(fault["syncs"] - 1):
            self._update(number % 2)
            result = self._ask(canary)
            if result["caught"]:
                return {"size": size, "clean": self.clean, **result}
        with ExitStack() as stack:
            for client in self.fleet._clients if fault["kind"] in ("stale cache", "no label") else ():
                post = partial(self._post_with_fault, fault["kind"], client._post)
                stack.enter_context(mock.patch.object(client, "_post", post))
            try:
                self._update(1)
            except RuntimeError as error:
                self.fleet.revive()  # its servers have ended, and the next fault needs them
                return {"size": size, "caught": {"transfer": str(error)}}
        result = {"size": size, "clean": self.clean, **self._ask(canary)}
        self.fault("none")
        return result

    def _post_with_fault(
        self, kind: str, post: Callable[..., Any], path: str, body: dict[str, Any] | None = None, timeout: Any = None
    ) -> Any:
        if kind == "stale cache":  # both a pause and the sync's own request empty it
            if path == "/reset_prefix_cache":
                return {}
            path = path.replace("/pause?", "/pause?clear_cache=false&")
        if kind == "no label" and path == "/finish_weight_update":
            body = {"weight_version": f"{self.updates - 1}:old"}
        return post(path, body, timeout)

    def _ask(self, canary: Canary) -> dict[str, Any]:
        caught: dict[str, str] = {}
        figures: dict[str, float] = {}
        step = self.updates
        ours = self.engine.prompt_logprobs(self.prompt)
        theirs = self.fleet.prompt_logprobs(self.prompt)
        figures["prompt"] = max(abs(a - b) for values in theirs.values() for a, b in zip(ours, values, strict=True))
        mean_gap = Canary.usual_gaps(ours, theirs)[0]
        self.first_gap = self.first_gap or mean_gap
        self.drift = max(self.drift, mean_gap / self.first_gap)
        figures["drift"] = self.drift  # the largest of all syncs with this fault
        with _noting(caught, "read back"):
            Canary.check_read_back(step, self.fleet.read_back())
        with _noting(caught, "prompt"):
            canary.check(step, self.prompt, ours, theirs)
        with _noting(caught, "version"):
            readings = self.fleet.read_through_cache(self.cached, CACHED_TOKENS)
            pairs = [
                pair for reading in readings.values() for pair in zip(reading.logprobs, reading.logprobs_without, strict=True)
            ]
            if pairs:  # or else another token was drawn
                figures["cache"] = max(abs(through - without) for through, without in pairs)
            with _noting(caught, "cache"):
                canary.check_cache(step, readings)
            parts = [self._sample()]
            result = Tolerances(0.0, math.inf).check_rollouts(step, parts)
            figures["rollouts"] = result["canary/rollouts_worst_group"]
            figures["rollouts, worst token"] = result["canary/rollouts_max_gap"]
            with _noting(caught, "rollouts"):
                Tolerances.of(self.config).check_rollouts(step, parts)
        return {"figures": figures, "caught": caught}


@contextmanager
def _noting(caught: dict[str, str], check: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        caught[check] = str(error)


def _main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = _World(Path(sys.argv[1]), sys.argv[2])
    try:
        for fault in map(json.loads, sys.stdin):
            result = []
            for size in fault["sizes"]:
                result.append(world.measure(fault, size))
                if not result[-1]["caught"]:
                    break  # smaller ones are not seen either
            print(json.dumps(result), file=replies, flush=True)
    finally:
        world.fleet.stop()
        world.engine.close()


if __name__ == "__main__":
    _main()
