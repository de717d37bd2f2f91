"""The servers of a run, as its config places them: processes of this machine, or stand-ins for those of other nodes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.sampler.fleet.external import ExternalServer, external_servers
from tepo_megatron.sampler.vllm.server.limits import check_machine, raise_open_files, weights_bytes
from tepo_megatron.sampler.vllm.server.resources import server_seed, worker_cores
from tepo_megatron.sampler.vllm.server.server import Server, has_gpu


def make_servers(
    config: ServerConfig,
    *,
    model_dir: Path,
    dtype: str,
    log_dir: Path,
    seed: int,
    first_gpu: int,
    trained: bool = False,
    adapter_rank: int | None = None,
    tokenizer: bool = False,
) -> tuple[ServerConfig, str, Sequence[Server | ExternalServer]]:
    """The config with the address at which they are reached, their key, and the servers, none of them started yet.

    Those of this machine take ``config.tp`` GPUs each, from ``first_gpu`` on, where it has any. ``trained``: a weight update
    comes before the first sample; ``adapter_rank``: it brings adapters of this rank, for weights that servers read;
    ``tokenizer``: they load the model's. Raises ValueError where this machine has too little left for them.
    """
    if config.placement == "external":
        return external_servers(config, log_dir)
    raise_open_files()
    check_machine(config, config.count, weights_bytes=weights_bytes(model_dir), on_gpu=has_gpu())
    key = secrets.token_urlsafe(32)
    servers = [
        Server(
            config,
            model_dir=model_dir,
            dtype=config.served_dtype(dtype),
            cores=cores,
            key=key,
            log=log_dir / f"server-{index}.log",
            seed=server_seed(seed, index),
            gpus=range(first_gpu + index * config.tp, first_gpu + (index + 1) * config.tp),
            dummy=adapter_rank is None and config.starts_with_dummies(trained=trained),
            adapter_rank=adapter_rank,
            tokenizer=tokenizer,
        )
        for index, cores in enumerate(worker_cores(config, config.count))
    ]
    return config, key, servers
