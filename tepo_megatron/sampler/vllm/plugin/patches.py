"""Changes to vLLM (0.32) and torch in a server's processes."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tepo_megatron.versions import VLLM_RANGE, in_range

_SIGNATURE_BYTES = hashlib.sha256().digest_size


def sign_objects(key: str) -> None:
    """Makes torch's collectives sign and check Python objects; every member of a group must call it. vLLM's workers exchange
    pickles through loopback ports without a key, by which another user could run code.
    """
    from torch.distributed import distributed_c10d

    secret = hashlib.sha256(b"objects between workers " + key.encode()).digest()

    class Pickler:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            data = pickle.dumps(value)
            self._file.write(_signature(secret, data) + data)

    class Unpickler:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def load(self) -> Any:
            signature, data = self._file.read(_SIGNATURE_BYTES), self._file.read()
            if not hmac.compare_digest(signature, _signature(secret, data)):
                raise RuntimeError(
                    "an object came to this worker that no other worker of this server has signed; it was not read"
                )
            return pickle.loads(data)  # noqa: S301  # one of this server's workers has made it

    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]


def _signature(secret: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, data, "sha256")


SPECULATES_VARIABLE = "TEPO_SERVER_SPECULATES"


def mend_expansion() -> None:
    """On CPUs: vLLM 0.32's rejection sampler divides logits by uninitialised memory. ``tests/unit/sampler/test_speculative.py``
    fails when it no longer does.
    """
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and in_range(vllm.__version__, VLLM_RANGE):
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeats each value of ``x`` [batch] for the tokens of its request: [num_tokens]. ``cu_num_tokens`` [batch] are the
    requests' ends. The names are vLLM's.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)
