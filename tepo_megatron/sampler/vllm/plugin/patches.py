"""Changes to vLLM 0.32 and torch in a server's processes."""

import hashlib
import hmac
import os
import pickle
import signal
import socket
import stat
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tepo_megatron.runtime.machine import read_cores
from tepo_megatron.sampler.vllm.wire import ADAPTER_PATH
from tepo_megatron.versions import VLLM_RANGE, in_range

_SIGNATURE_BYTES = hashlib.sha256().digest_size


def sign_objects(key: str) -> None:
    """Every member of a group calls it: workers exchange pickles by ports without a key, where another user could send code."""
    from torch.distributed import distributed_c10d

    secret = hashlib.sha256(b"objects between workers " + key.encode()).digest()
    sign = partial(hmac.digest, secret, digest="sha256")

    class Signed:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            data = pickle.dumps(value)
            self._file.write(sign(data) + data)

        def load(self) -> Any:
            signature, data = self._file.read(_SIGNATURE_BYTES), self._file.read()
            if not hmac.compare_digest(signature, sign(data)):
                raise RuntimeError(
                    "an object came to this worker that no other worker of this server has signed; it was not read"
                )
            return pickle.loads(data)  # noqa: S301  # one of this server's workers has made it

    distributed_c10d._pickler = distributed_c10d._unpickler = Signed  # type: ignore[assignment]


def _patches_apply() -> bool:
    import vllm
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and in_range(vllm.__version__, VLLM_RANGE)


def mend_expansion() -> None:
    """vLLM 0.32 divides logits by uninitialised memory on CPUs; ``test_speculative.py`` fails when it no longer does."""
    if _patches_apply():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


def _expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """``x`` [batch] → [num_tokens]. ``cu_num_tokens`` [batch] are ends."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_processes() -> None:
    """Call it before vLLM makes its config; affects CPUs only."""
    from vllm import envs

    if not _patches_apply():
        return
    # vLLM's table of variables, which it asks at each use: its platform writes the variable itself whenever it sees a config.
    envs.environment_variables[_METHOD] = lambda: "fork"
    os.register_at_fork(after_in_child=_leave_parent)


def rest_while_waiting() -> None:
    """Affects CPUs only, where vLLM's workers spin for a second after each message, and take cores from trainer and engine."""
    from vllm.distributed.device_communicators import shm_broadcast

    if _patches_apply():
        shm_broadcast.sched_yield = partial(time.sleep, 1e-4)


def take_cores(cores: str, worker: int) -> int:
    """Binds this thread and its later ones to part ``worker`` of ``cores`` (``0|1``); returns their number."""
    requested = set(read_cores(cores)[worker])
    try:
        os.sched_setaffinity(0, requested)
        taken = os.sched_getaffinity(0)
    except OSError:
        taken = set()
    if taken != requested:  # the kernel accepts a list with missing cores
        missing = ", ".join(map(str, sorted(requested - taken)))
        raise ValueError(
            f"worker {worker} of this server cannot run on core {missing}: there is none, or it is kept from this job; set "
            "rollout.server.cpu_threads to cores that it has, or to auto"
        )
    return len(requested)


def _leave_parent() -> None:
    """A fork leaves the signals and sockets of the server's event loop."""
    signal.set_wakeup_fd(-1)
    with open(os.devnull, "rb") as nothing:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if _is_internet_socket(descriptor):
                os.dup2(nothing.fileno(), descriptor)  # keeps the number: the parent's objects would close another's


def _is_internet_socket(descriptor: int) -> bool:
    try:
        copy = os.dup(descriptor)
    except OSError:  # that of the listing, closed by now
        return False
    if not stat.S_ISSOCK(os.fstat(copy).st_mode):
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as inherited:
        return inherited.family in (socket.AF_INET, socket.AF_INET6)


_adapters: list[tuple[Mapping[str, Any], Mapping[str, Tensor]]] = []  # a PEFT folder's settings, and tensors without its prefix


def hold_adapters(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """vLLM forgets adapters when a weight update ends."""
    _adapters[:] = [(settings, tensors)]


def load_adapters_from_memory() -> None:
    from vllm.lora.worker_manager import WorkerLoRAManager

    from_folder = WorkerLoRAManager._load_adapter

    def load(manager: Any, request: Any) -> Any:
        return _adapters_from_memory(manager, request) if request.lora_path == ADAPTER_PATH else from_folder(manager, request)

    WorkerLoRAManager._load_adapter = load


def _adapters_from_memory(manager: Any, request: Any) -> Any:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    if not _adapters:
        raise RuntimeError("this worker holds no adapters yet; the trainer sends them with the first weight update")
    (settings, tensors), inner = _adapters[0], manager._adapter_manager
    helper = PEFTHelper.from_dict(dict(settings))
    helper.validate_legal(manager.lora_config)
    mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
    adapters = LoRAModel.from_lora_tensors(
        request.lora_int_id,
        # vLLM multiplies the scale into B in place
        {name: tensor.clone() for name, tensor in tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    packed = inner.packed_modules_mapping
    known = {part for name in inner.supported_lora_modules for part in packed.get(name, [name])}
    unknown = sorted(name for name in adapters.loras if name.rpartition(".")[2] not in known)
    if unknown:
        raise RuntimeError(f"vLLM has no place for the adapters of {', '.join(unknown[:4])}; set model.lora.serve = merged")
    return adapters
