"""A Python interpreter as a tool: each program runs in a sandbox (``runtime/workers/sandbox.py``)."""

from __future__ import annotations

import asyncio
import re

from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.runtime.workers.sandbox import Sandbox, require_no_network
from tepo_megatron.tasks.environments.protocol import StepResult
from tepo_megatron.tasks.reward.verifiers import load_verifier


class PythonTool:
    """What the model writes between ``begin`` and ``end`` is run as a program, and it reads the output between ``open`` and
    ``close``; a turn without a program is its answer, which ``verifier`` rates.

    Each program starts anew, in an empty folder: nothing is kept between two of them. It has ``seconds`` of the clock and of
    processor time, ``memory_mb`` of memory, ``output`` characters of output, 64 open files of 10 MB each, and starts no process
    (unless this user is root); it imports the standard library, and not what is installed beside it. A program that raises,
    prints nothing or passes a limit is answered with the last line that it wrote or why it was ended, and counts as a tool
    error. Of a worker's episodes 16 run a program at a time. Needs ``environment.run_code``, and a kernel that takes the
    network away from the worker; made elsewhere it raises RuntimeError.
    """

    runs_code = True
    _at_once = asyncio.Semaphore(16)

    def __init__(
        self,
        begin: str = "<python>",
        end: str = "</python>",
        open: str = "<output>",
        close: str = "</output>",
        verifier: str = "last_word",
        seconds: float = 5.0,
        memory_mb: int = 256,
        output: int = 2000,
    ) -> None:
        require_no_network()
        self._program = re.compile(re.escape(begin) + r"(.*?)" + (re.escape(end) if end else "$"), re.S)
        self._open, self._close = open, close
        self._verify = load_verifier(verifier)
        self._sandbox, self._output = Sandbox(seconds, memory_mb), output
        self._problem: Problem | None = None

    def reset(self, problem: Problem, seed: int) -> None:
        self._problem = problem

    async def step(self, action: ResponseText) -> StepResult:
        programs = self._program.findall(action)
        if not programs:
            return StepResult(reward=self._verify(self._problem, action), done=True)
        async with self._at_once:
            said, failed = await self._run(programs[-1])
        return StepResult(f"{self._open}{said}{self._close}", tool_error=failed)

    async def _run(self, program: str) -> tuple[str, bool]:
        """What a program printed, and whether it failed."""
        ran = await self._sandbox.run(("-c", program), kept=4 * self._output)
        if ran.limit is not None:
            return f"error: {ran.limit}", True
        if ran.status != 0:
            lines = ran.tail.decode("utf-8", "replace").strip().splitlines()
            return f"error: {lines[-1][: self._output] if lines else f'it ended with {ran.status}'}", True
        text = ran.head.decode("utf-8", "replace").strip()
        shown = text if len(text) <= self._output else f"{text[: self._output]} ..."
        return shown or "(it printed nothing)", not shown
