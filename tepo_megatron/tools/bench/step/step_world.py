"""The parent of ``tepo bench step``'s single-threaded ranks, which it asks for one step at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tepo_megatron.config import RunConfig
from tepo_megatron.tools.bench.settings import StepSetting
from tepo_megatron.tools.bench.step.step_data import rank_arguments

_SCRIPT = Path(__file__).with_name("step_rank.py")

_END_S = 20.0


class World:
    def __init__(self, root: Path, model: Path, setting: StepSetting, layout: str) -> None:
        self.layout = layout
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tepo-step-")))
        arguments = rank_arguments(setting, layout)
        world = RunConfig.model_validate(arguments["config"]).engine.parallel.world_size
        arguments |= {"model": str(model), "store": str(self.folder / "store")}
        self.ranks: list[subprocess.Popen[str]] = []
        self.replies: list[TextIO] = []
        try:
            for rank in range(world):
                self._start(root, rank, world, arguments)
        except BaseException:
            self.close()
            raise

    def _start(self, root: Path, rank: int, world: int, arguments: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        self.replies.append(self.stack.enter_context(os.fdopen(reading)))
        log = self.stack.enter_context(self._log(rank).open("w"))
        environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            # -P: do not import from the script's folder, since the package may be another checkout's
            process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), json.dumps(arguments), str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writing],
                env=os.environ | environment,
            )
        finally:
            os.close(writing)
        self.ranks.append(process)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def step(self, method: str, ratio: float, *, memory: bool) -> dict[str, float]:
        """Each figure is the largest of all ranks. Raises RuntimeError with a rank's last line if it ended."""
        for rank, process in enumerate(self.ranks):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"method": method, "ratio": f"{ratio:g}", "memory": memory}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank) from None
        answers = []
        for rank, reply in enumerate(self.replies):
            line = reply.readline()
            if not line:
                raise self._failure(rank)
            answers.append(json.loads(line))
        names = answers[-1]  # the last rank is in the last pipeline stage, and only that stage knows the loss
        return {name: max(answer[name] for answer in answers if name in answer) for name in names}

    def _failure(self, rank: int) -> RuntimeError:
        code = self.ranks[rank].wait()
        said = self._log(rank).read_text().strip().splitlines() or ["it wrote nothing"]
        return RuntimeError(f"{self.layout}: rank {rank} ended with exit code {code}: {said[-1]}")

    def close(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:  # the rank has ended
                continue
        for process in self.ranks:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # its peer failed, and it waits in a collective
                process.kill()
                process.wait()
        self.stack.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            for process in self.ranks:
                process.kill()
        self.close()
