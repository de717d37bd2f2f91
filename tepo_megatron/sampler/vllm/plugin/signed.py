"""Objects that vLLM's workers exchange by torch's collectives carry a signature under the run's key; no others are read.

vLLM pickles them, and the workers of one server speak through ports of the loopback address that ask for no key: without the
signature, another user who takes a worker's place in the moment in which they connect could have code run by the others.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from typing import Any, BinaryIO

SIGNATURE_BYTES = hashlib.sha256().digest_size


def sign_objects(key: str) -> None:
    """From here on torch's collectives of Python objects sign and check in this process; every member of a group must."""
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
            signature, data = self._file.read(SIGNATURE_BYTES), self._file.read()
            if not hmac.compare_digest(signature, _signature(secret, data)):
                raise RuntimeError(
                    "an object came to this worker that no other worker of this server has signed; it was not read"
                )
            return pickle.loads(data)  # noqa: S301  # one of this server's workers has made it

    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler  # type: ignore[assignment]


def _signature(secret: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, data, "sha256")
