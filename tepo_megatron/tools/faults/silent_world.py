"""A trainer and a real server with a faulty worker: ``python -m tepo_megatron.tools.faults.silent_world FOLDER SERVER``.

Each input line is JSON with a ``SilentFault``'s fields and ``sizes``. The answer lists, for each size, what every check
measured and which checks stopped the run.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.core.types import Batch
from tepo_megatron.run.consistency_checks import (
    CACHED_TOKENS,
    Canary,
    agreements,
    cached_prompt,
    canary_prompt,
    check_agreement,
    rollouts_tolerance,
    tolerance,
)
from tepo_megatron.run.weights import make_shard_sender
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import load_problems
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.weights.architecture import model_spec
from tepo_megatron.weights.layouts import tensor_shapes
from tepo_megatron.weights.storage.hf_folder import write_model

EXPERTS = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "rms_norm_eps": 1e-5},
    **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256},
    **{"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"tie_word_embeddings": True, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
SAMPLES, NEW_TOKENS = 4, 24
RANDOM_STD = 0.12


class World:
    """One trainer rank with the weights of two successive steps, and one server."""

    def __init__(self, folder: Path, server: str) -> None:
        from tepo_megatron.trainer.megatron.engine import Engine

        self.config = RunConfig.model_validate(
            {
                "model": {"dtype": "bfloat16" if "bf16" in server else "float32"},
                "optimizer": {"lr": 5e-5, "warmup_steps": 0},
                "rollout": {
                    "sampling": {"temperature": 0.9},
                    "server": {
                        "tp": 2 if server == "two workers" else 1,
                        "extra_args": ["--worker-extension-cls", "tepo_megatron.tools.faults.in_worker.FaultyWorker"],
                    },
                },
            }
        )
        model = _make_experts(folder / "experts") if server == "experts" else resolve_model_path("builtin:tiny")
        self.engine = Engine(self.config, model)
        self.sender = make_shard_sender(self.config, self.engine.weights)
        spec = self.engine.spec
        self.prompt = canary_prompt(spec.vocab_size, spec.max_positions)
        self.cached = cached_prompt(spec.vocab_size, spec.max_positions)
        tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"))
        self.prompts = [tuple(tokenizer.prompt_ids(item.prompt)) for item in load_problems("builtin:addition-heldout")[:8]]
        dtype = self.config.model.dtype
        self.fleet = Fleet(
            self.config.rollout.server, model_dir=model, dtype=dtype, stop_token_ids=tokenizer.eos_ids, log_dir=folder
        )
        self.fleet.start()
        self.updates = 0
        self.weights = [self._copy()]
        self.fault("none")
        self._update(0)
        self._train()
        self.weights.append(self._copy())
        self._update(1)
        self.clean: dict[str, float] = self._ask(Canary(tolerance(self.config)))["figures"]

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.engine.policy.params.items()}

    def _train(self) -> None:
        batch = self._sample()
        for part in batch:
            self.engine.update(part)

    def _update(self, which: int) -> None:
        with torch.no_grad():
            for name, param in self.engine.policy.params.items():
                param.copy_(self.weights[which][name])
        self.updates += 1
        self.fleet.update_weights_from_shards(self.engine.weights.version(self.updates), self.sender)

    def fault(self, kind: str, param: str = "", scale: float = 1.0) -> None:
        for client in self.fleet._clients:
            given = json.dumps({"kind": kind, "param": param, "scale": scale})
            client._post("/collective_rpc", {"method": "tepo_fault", "args": [given]})

    def _sample(self) -> list[Batch]:
        sampling = self.config.rollout.sampling
        groups = self.fleet.generate(
            self.prompts, n=SAMPLES, temperature=sampling.temperature, max_new_tokens=NEW_TOKENS, seed=self.updates
        )
        rollouts = [
            Rollout(
                problem_id=str(group),
                group=group,
                prompt_ids=self.prompts[group],
                response_ids=response.response_ids,
                sampler_logprobs=response.logprobs,
                finish_reason=response.finish_reason,
                versions=response.versions,
                reward=float(index % 2),
            )
            for group, responses in enumerate(groups)
            for index, response in enumerate(responses)
        ]
        return [self.engine.score(self.engine.batch_from_root(rollouts))]

    def measure(self, fault: Mapping[str, Any], size: float) -> dict[str, Any]:
        """Results of every check for a sync with the fault, after one without."""
        canary = Canary(tolerance(self.config))
        self.fault("none")
        self._update(0)
        self._ask(canary)
        self.fault(fault["kind"], fault["param"], size)
        with self._faulty_client(fault["kind"]):
            try:
                self._update(1)
            except RuntimeError as error:
                self.fleet.revive()  # its servers have ended, and the next fault needs them
                return {"size": size, "caught": {"transfer": str(error)}}
        result = {"size": size, "clean": self.clean, **self._ask(canary)}
        self.fault("none")
        return result

    @contextmanager
    def _faulty_client(self, kind: str) -> Iterator[None]:
        clients = self.fleet._clients
        for client in clients:
            if kind in ("stale cache", "no label"):
                client.__dict__["_post"] = partial(self._post_with_fault, kind, client._post)
        yield
        for client in clients:
            client.__dict__.pop("_post", None)

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
        figures["prompt"] = max(abs(a - b) for given in theirs.values() for a, b in zip(ours, given, strict=True))
        with _noting(caught, "prompt"):
            canary.check(step, self.prompt, ours, theirs)
        with _noting(caught, "version"):
            through = self.fleet.cached_logprobs(self.cached, CACHED_TOKENS)
            figures["cache"] = max(abs(a - b) for pair in through.values() for a, b in zip(*pair, strict=True))
            with _noting(caught, "cache"):
                canary.check_cache(step, through)
            parts = self._sample()
            result = agreements(parts)
            figures["rollouts"] = max(item.mean for item in result)
            figures["rollouts, worst token"] = max(item.largest for item in result)
            with _noting(caught, "rollouts"):
                limit = rollouts_tolerance(self.config)
                check_agreement(step, parts, tolerance=limit, token_tolerance=tolerance(self.config))
        return {"figures": figures, "caught": caught}

    def close(self) -> None:
        self.fleet.stop()
        self.engine.close()


@contextmanager
def _noting(caught: dict[str, str], check: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        caught[check] = str(error)


def _make_experts(folder: Path) -> Path:
    source = folder.with_name("experts-description")
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(EXPERTS))
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(model_spec(EXPERTS, "the model with experts"))
    tensors = (
        (name, RANDOM_STD * torch.randn(shape, generator=generator) + (len(shape) == 1)) for name, shape in shapes.items()
    )
    if not (folder / "config.json").exists():
        write_model(folder, tensors, source=source, dtype=torch.float32)
    return folder


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    world = World(Path(sys.argv[1]), sys.argv[2])
    try:
        for line in sys.stdin:
            fault = json.loads(line)
            result = []
            for size in fault["sizes"]:
                result.append(world.measure(fault, size))
                if not result[-1]["caught"]:
                    break  # smaller ones are not seen either
            replies.write(json.dumps(result) + "\n")
            replies.flush()
    finally:
        world.close()


if __name__ == "__main__":
    main()
