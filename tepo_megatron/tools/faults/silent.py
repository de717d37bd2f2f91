"""Faults in a vLLM worker that no digest sees: which check stops the run, and at which size of error."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome

Server = Literal["dense", "dense bf16", "experts", "two workers"]


@dataclass(frozen=True)
class SilentFault:
    """``kind``: what ``in_worker.py`` does to parameters whose name ends with ``param`` (empty: all), or to something else.
    ``server``: the server that gets it. ``scales``: whether the error's size can be chosen; if not, only the whole error
    exists."""

    name: str
    kind: str
    param: str = ""
    server: Server = "dense"
    scales: bool = True


SILENT_FAULTS: tuple[SilentFault, ...] = (
    SilentFault("halves of gate/up swapped in one MLP", "swap halves", "layers.1.mlp.gate_up_proj.weight"),
    SilentFault("an update that never took place, and says it did", "stale"),
    SilentFault("a stale prefix cache", "stale cache", scales=False),
    SilentFault("a wrong temperature in the sampler", "temperature"),
    SilentFault("a rotary buffer lost (sleep level 2)", "buffer lost"),
    SilentFault("one layer not loaded", "stale", "layers.2."),
    SilentFault("weights of the step before, at every step", "one behind"),
    SilentFault("a wrong rotary base", "rotary base"),
    SilentFault("a square weight transposed", "transpose", "layers.1.self_attn.o_proj.weight"),
    SilentFault("two query heads exchanged", "exchange heads", "layers.0.self_attn.qkv_proj.weight"),
    SilentFault("a norm's weight zeroed in one layer", "zero", "layers.3.input_layernorm.weight"),
    SilentFault("rows of the head beyond a boundary of the vocabulary stale", "stale rows", "lm_head.weight"),
    SilentFault("an update that never took place, without its label", "no label", scales=False),
    SilentFault("halves of gate/up swapped in one expert", "swap halves of an expert", "experts.w13_weight", "experts"),
    SilentFault("a tied head not updated", "stale head", "embed_tokens.weight", "experts"),
    SilentFault("one worker of two stale", "stale in worker 1", "", "two workers"),
)
"""In the order of ``--quick``; those of other servers than the first come last."""


SIZES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
CONTROL = SilentFault("no fault: no check may stop the run", "none", scales=False)
ALL: tuple[SilentFault, ...] = (
    CONTROL,
    *SILENT_FAULTS,
    replace(CONTROL, name=f"{CONTROL.name} (bf16)", server="dense bf16"),
    *(replace(fault, name=f"{fault.name} (bf16)", server="dense bf16") for fault in SILENT_FAULTS if fault.server == "dense"),
)
ROUNDING = 3.0
"""Multiple of bfloat16's rounding, with which every run trains, below which an error counts as none."""

CHECKS = ("transfer", "prompt", "version", "cache", "rollouts")


class SilentFaults(FaultClass):
    """One server per kind serves all its faults; ``details`` has the figures of every size."""

    name = "silent"
    title = "wrong weights, buffers, caches or temperature in a vLLM worker, behind the digests"
    whole, quick = len(ALL), 4
    _world: subprocess.Popen[str] | None = None
    _server = ""

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        fault = ALL[number % len(ALL)]
        sizes = SIZES if fault.scales and not self.workshop.is_quick else SIZES[:1]
        result = self._ask(fault, sizes)
        return judge(fault, result)

    def _ask(self, fault: SilentFault, sizes: Sequence[float]) -> list[dict[str, Any]]:
        if self._world is None or self._server != fault.server:
            self._start(fault.server)
        world = self._world
        assert world is not None
        assert world.stdin is not None
        assert world.stdout is not None
        world.stdin.write(json.dumps({**asdict(fault), "sizes": list(sizes)}) + "\n")
        world.stdin.flush()
        answer = world.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError(f"the trainer and its server ended; {self.folder / 'log.txt'} says why")
        result: list[dict[str, Any]] = json.loads(answer)
        return result

    def _start(self, server: str) -> None:
        self.close()
        self.workshop.say(f"a trainer and a server: {server} …")
        with (self.folder / "log.txt").open("ab") as log:
            self._world = subprocess.Popen(
                [sys.executable, "-m", "tepo_megatron.tools.faults.silent_world", str(self.folder), server],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._server = server

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            assert world.stdin is not None
            world.stdin.close()  # ends the world, and with it the server
            try:
                world.wait(60)
            except subprocess.TimeoutExpired:
                world.kill()
                world.wait()


def judge(fault: SilentFault, result: Sequence[dict[str, Any]]) -> FaultOutcome:
    """The whole error must be caught; the details say by which check, and the smallest error that each catches."""
    whole = result[0]
    smallest = {check: min((item["size"] for item in result if check in item["caught"]), default=None) for check in CHECKS}
    details = {"smallest": smallest, "found": result}
    caught = whole["caught"]
    if "transfer" in caught:  # these faults come after the transfer
        return FaultOutcome(fault.name, "lost", f"the weight update itself failed: {caught['transfer']}", details=details)
    if fault.kind == "none":
        if caught:
            return FaultOutcome(fault.name, "lost", f"a false alarm: {'; '.join(caught.values())}", details=details)
        return FaultOutcome(fault.name, "survived", details=details)
    if not caught:
        figures = ", ".join(
            f"{name} {value:.1e} (without a fault {whole['clean'][name]:.1e})" for name, value in whole["figures"].items()
        )
        if fault.server == "dense bf16" and all(
            value <= ROUNDING * whole["clean"][name] for name, value in whole["figures"].items()
        ):
            return FaultOutcome(
                fault.name, "survived", f"no larger than bfloat16's rounding, and not seen: {figures}", details=details
            )
        return FaultOutcome(fault.name, "lost", f"no check saw it: {figures}", details=details)
    by = ", ".join(check for check in CHECKS if check in caught)
    return FaultOutcome(fault.name, "refused", f"caught by {by}: {next(iter(caught.values()))[:300]}", details=details)
