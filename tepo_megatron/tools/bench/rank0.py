"""What a step's responses cost rank 0: receive, pack, write to the journal, send to another rank."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from tepo_megatron.core.rollout import Response, Rollout, WeightsVersion
from tepo_megatron.sampler.rollout_file import write_rollouts
from tepo_megatron.sampler.vllm.client.answers import read_frames, read_response
from tepo_megatron.sampler.vllm.wire import end_frame, response_frame
from tepo_megatron.trainer.megatron.batching.batch import broadcast
from tepo_megatron.trainer.packing import pack

VOCABULARY, PROMPT, GROUP = 128_256, 256, 8
PIECE = 65_536

VERSION = WeightsVersion(7, "0123456789abcdef")
LABEL = f"{VERSION.step}:{VERSION.digest}"

SAMPLE = 8
"""Responses of the older path: all would take gigabytes of JSON."""


@dataclass(frozen=True)
class Rank0Measurement:
    """Seconds for ``responses`` responses of ``length`` tokens; those for JSON are extrapolated from ``SAMPLE`` responses."""

    responses: int
    length: int
    read_s: float
    pack_s: float
    journal_s: float
    broadcast_s: float
    """To one other rank of this machine, over gloo."""
    json_read_s: float
    json_pack_s: float

    COLUMNS: ClassVar[tuple[str, ...]] = ("rank 0, seconds", "arrays", "JSON before", "ratio")

    def table(self) -> list[tuple[str, ...]]:
        rows = [("read off the wire and checked", self.read_s, self.json_read_s), ("packed", self.pack_s, self.json_pack_s)]
        rows.append(("both", self.read_s + self.pack_s, self.json_read_s + self.json_pack_s))
        cells = [(name, f"{ours:.2f}", f"{theirs:.1f}", f"{ours / theirs:.3f}") for name, ours, theirs in rows]
        size = f"{self.responses} × {self.length}"
        cells += [("written to the journal", f"{self.journal_s:.2f}", "", "")]
        cells += [("sent to another rank (gloo)", f"{self.broadcast_s:.2f}", "", "")]
        return [(f"{name}, {size}", *rest) for name, *rest in cells]


def measure_rank0(responses: int, length: int, say: Callable[[str], None]) -> Rank0Measurement:
    say(f"rank 0: {responses} responses of {length} tokens")
    begin = time.perf_counter()
    rollouts = [_rollout(index, item) for index, item in _receive(responses, length)]
    read = time.perf_counter()
    batch = pack(rollouts)
    packed = time.perf_counter()
    assert batch.num_tokens == responses * (length + PROMPT)
    del batch
    with tempfile.TemporaryDirectory() as folder:
        journal = time.perf_counter()
        write_rollouts(Path(folder), 0, rollouts)
        journal_s = time.perf_counter() - journal
    del rollouts
    some = min(SAMPLE, responses)
    say(f"rank 0: the older path, {some} responses")
    json_read_s, json_pack_s = _older(some, length)
    times = responses / some
    return Rank0Measurement(
        *(responses, length, read - begin, packed - read, journal_s, _broadcast_s(responses, length)),
        *(json_read_s * times, json_pack_s * times),
    )


def _broadcast_s(responses: int, length: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder, str(responses), str(length)]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        result = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"the ranks of the broadcast ended with {[rank.returncode for rank in ranks]}")
    return float(result[0])


def _send(folder: str, responses: int, length: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    batch = pack([_rollout(index, item) for index, item in _receive(responses, length)]) if rank == 0 else None
    dist.barrier()
    begin = time.perf_counter()
    broadcast(batch, torch.device("cpu"))
    dist.barrier()
    if rank == 0:
        sys.stdout.write(f"{time.perf_counter() - begin}\n")
    dist.destroy_process_group()


def _random(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCABULARY, length).astype(np.int32), -rng.random(length, dtype=np.float32)


def _receive(responses: int, length: int) -> Iterator[tuple[int, Response]]:
    ids, logprobs = _random(length)
    labels = {LABEL: VERSION}

    def pieces(numbers: Sequence[int]) -> Iterator[bytes]:
        for number in numbers:
            frame = response_frame(number, ids, logprobs, "length", [(0, LABEL)])
            yield from (frame[index : index + PIECE] for index in range(0, len(frame), PIECE))
        yield end_frame(len(numbers))

    for first in range(0, responses, GROUP):
        numbers = range(first, min(first + GROUP, responses))
        for frame in read_frames(pieces(numbers), numbers):
            result = read_response(frame, max_new_tokens=length, vocab_size=VOCABULARY, labels=labels, part=False)
            assert result is not None
            yield frame.head["sample"], result


def _rollout(index: int, response: Response) -> Rollout:
    prompt = np.arange(PROMPT, dtype=np.int32)
    result = (response.response_ids, response.logprobs, response.finish_reason, response.versions)
    return Rollout(f"p{index // GROUP}", index // GROUP, prompt, *result, reward=float(index % 2))


def _older(responses: int, length: int) -> tuple[float, float]:
    """Seconds to read and pack in the earlier format: JSON with an object per token, tuples, lists."""
    ids, logprobs = _random(length)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    content = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token, value in pairs]
    choice = {"token_ids": ids.tolist(), "logprobs": {"content": content}, "finish_reason": "length"}
    text = json.dumps({"choices": [choice] * responses})
    begin = time.perf_counter()
    drawn = [_older_response(choice) for choice in json.loads(text)["choices"]]
    read = time.perf_counter()
    prompt = tuple(range(PROMPT))
    tokens: list[int] = []
    labels: list[int] = []
    mask: list[bool] = []
    values: list[float] = []
    for response_ids, response_logprobs in drawn:
        sequence = prompt + response_ids
        tokens += sequence
        labels += (*sequence[1:], 0)
        mask += [False] * (PROMPT - 1) + [True] * len(response_ids) + [False]
        values += (*[0.0] * (PROMPT - 1), *response_logprobs, 0.0)
    tensors = [torch.tensor(tokens), torch.tensor(labels), torch.tensor(mask), torch.tensor(values, dtype=torch.float32)]
    assert [tensor.numel() for tensor in tensors] == [responses * (length + PROMPT)] * 4
    return read - begin, time.perf_counter() - read


def _older_response(choice: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids, logprobs = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in ids)
    assert all(type(value) in (int, float) and -float("inf") < value <= 1e-3 for value in logprobs)
    return tuple(ids), tuple(logprobs)


if __name__ == "__main__":
    _send(sys.argv[1], *map(int, sys.argv[2:]))
