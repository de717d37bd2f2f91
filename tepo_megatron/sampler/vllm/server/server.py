"""One vLLM server: its process group and its log."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple, TypeVar

from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.runtime.cores import load_hint
from tepo_megatron.runtime.leftovers import sweep
from tepo_megatron.runtime.proc import group_members
from tepo_megatron.sampler.vllm.server.checks import check_draft, check_quantization
from tepo_megatron.sampler.vllm.server.resources import reserve_port
from tepo_megatron.sampler.vllm.server.server_program import ServerProgram

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 30.0
"""A server on a busy machine may be slow to answer; a dead one refuses at once."""

LOG_LINES = 20


class Server:
    """A vLLM server, which never outlives the process that started it.

    ``cores`` is ``VLLM_CPU_OMP_THREADS_BIND``, ignored on GPUs; ``gpus`` are indices, by default all; ``key`` protects every
    path but /health and travels in the environment only. ``dummy``: it does not sample until it gets weights; ``adapter_rank``:
    until it gets adapters up to that rank. ``tokenizer``: it loads the model's, for stop strings and bad words.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        model_dir: Path,
        dtype: str,
        cores: str,
        key: str,
        log: Path,
        seed: int = 0,
        gpus: Sequence[int] = (),
        dummy: bool = False,
        adapter_rank: int | None = None,
        tokenizer: bool = False,
    ) -> None:
        """Raises ValueError if this machine cannot serve the quantization, or the draft model is invalid."""
        check_quantization(config.quantization)
        check_draft(config.speculative, model_dir)
        self.config = config
        self.log = log
        self.port = 0
        self._log_start = 0
        self.program = ServerProgram(
            config, model_dir, dtype, cores, key, seed, tuple(gpus), dummy=dummy, adapter_rank=adapter_rank, tokenizer=tokenizer
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._reserved: socket.socket | None = None

    @property
    def url(self) -> str:
        """Such as ``http://127.0.0.1:8000``; valid after :meth:`start`."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    def start(self, taken: Collection[int] = ()) -> None:
        """Does not wait for the server. It gets the first free port that is not in ``taken``; RuntimeError if there is none."""
        self.stop()
        self._reserved = reserve_port(self.config.host, self.config.port, taken)
        self.port = self._reserved.getsockname()[1]
        on_gpu = has_gpu()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tepo_megatron.runtime.supervise",
                    "--",
                    *self.program.command(on_gpu=on_gpu, port=self.port),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.program.environment(on_gpu=on_gpu),
                start_new_session=True,  # a Ctrl-C at the terminal is the trainer's; it stops its servers itself
            )

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Raises RuntimeError with the end of the log if the server dies or takes too long."""
        timeout_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            if not self.alive:
                raise RuntimeError(f"the vLLM server at {self.url} ended before it was ready.\n{self.log_end()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"the vLLM server at {self.url} was not ready within {timeout_s:g} s "
                    f"(rollout.server.start_timeout_s) and was stopped.{load_hint()}\n{self.log_end()}"
                )
            time.sleep(0.2)
        self._release_port()

    def _release_port(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    @property
    def alive(self) -> bool:
        """Whether the processes run; they may not answer."""
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        """Whether the server runs and reports a working engine."""
        return self.alive and is_healthy(self.config.host, self.port)

    def stop(self) -> None:
        """Ends all processes: SIGTERM, a wait of seconds, SIGKILL."""
        self._release_port()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()  # the supervisor ends the group; a forked relative of this process may hold the pipe open
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left
            os.killpg(process.pid, signal.SIGKILL)  # there is something left only if the supervisor itself was killed
        # Later processes may need its memory and GPU, and cannot remove its files while it lives.
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        sweep()

    def log_end(self, lines: int = LOG_LINES) -> str:
        """The log's path, its first error since the start (the likely cause) and its last lines."""
        try:
            with self.log.open(errors="replace") as log:
                log.seek(self._log_start)
                text = log.read().splitlines()
        except OSError as error:
            return f"Its log {self.log} cannot be read: {error.strerror}"
        parts = [f"The last lines of {self.log}:", *(f"  {line}" for line in text[-lines:])]
        if cause := first_error(text):
            parts = [f"The first error in {self.log}:", *(f"  {line}" for line in cause), *parts]
        return "\n".join(parts)


def is_healthy(host: str, port: int) -> bool:
    connection = HTTPConnection(host, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def for_all_at_once(servers: Sequence[T], action: Callable[[T], None]) -> None:
    """Raises the first error without waiting for the others."""
    pool = ThreadPoolExecutor(len(servers), thread_name_prefix="server")
    try:
        requests = [pool.submit(action, server) for server in servers]
        for request in wait(requests, return_when=FIRST_EXCEPTION).done:
            request.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_LINE = re.compile(
    r"(?:\((?P<process>[^)]* pid=\d+)\) )?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
    r"(?P<text>.*)"
)
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(:|$)")
"""The line after a traceback's indented frames."""
_ANOTHER_FOLLOWS = ("During handling of the above exception", "The above exception was the direct cause")
_ERROR = re.compile(r"\b(\w*(Error|Exception)|error): \S")
"""A line that reports an error without a traceback, such as argparse's ``program: error: why``."""


_CONSEQUENCES = re.compile(
    r"WorkerProc initialization failed due to an exception in a background process"
    r"|Engine core initialization failed"
    r"|Worker ?proc\S* .*died unexpectedly"
    r"|EngineDeadError|EngineCore encountered an issue"
)
"""vLLM's messages about a failure of another process; shown only without that process' own error."""
_TRACKER = "multiprocessing/resource_tracker.py"
"""Python's tracker complains when processes that shared memory end in disorder, which is never the cause."""


class _Line(NamedTuple):
    process: str
    """Empty if the line does not name one."""
    level: str
    """Empty for a bare line."""
    text: str


def first_error(log: Sequence[str]) -> list[str]:
    """The lines of the first error, since later ones are consequences; empty if the log reports none.

    That is the last exception of the first traceback's chain; otherwise the first line that is logged as an error or reads like
    one. It skips levels below ERROR (healthy servers log tracebacks as warnings), Python's resource tracker, and vLLM's
    messages about processes that have errors of their own.
    """
    lines = [line for line in map(_parse, log) if line.level in ("", "ERROR", "CRITICAL")]
    starts = [number for number, line in enumerate(lines) if line.text == _TRACEBACK and not _of_tracker(lines, number)]
    raised = [found for start in starts if (found := _raised(lines, start))]
    said = [[line.text] for line in lines if line.text and (line.level or _ERROR.search(line.text)) and line.text != _TRACEBACK]
    candidates = [*raised, *said]
    return next((found for found in candidates if not _CONSEQUENCES.search(found[0])), candidates[0] if candidates else [])


def _of_tracker(lines: Sequence[_Line], start: int) -> bool:
    return any(_TRACKER in line.text for line in lines[start + 1 : start + 2])


def _parse(line: str) -> _Line:
    found = _LINE.fullmatch(line)
    assert found is not None  # every part may be empty
    return _Line(found["process"] or "", found["level"] or "", found["text"])


def _raised(lines: Sequence[_Line], start: int) -> list[str]:
    """Empty if the log ends within the traceback."""
    # Two workers that fail together write their tracebacks through one another.
    own = [line.text for line in lines[start:] if (line.process, line.level) == (lines[start].process, lines[start].level)]
    raised: list[str] = []
    in_frames = in_chain = True
    for text in own[1:]:
        if in_frames:
            if _RAISED.match(text):
                raised, in_frames, in_chain = [text], False, False
        elif text == _TRACEBACK:
            if not in_chain:
                break
            in_frames = True
        elif text.startswith(_ANOTHER_FOLLOWS):
            in_chain = True
        elif text.startswith(" ") and not in_chain:
            raised.append(text)  # pydantic's messages have several lines
        elif text and not in_chain:
            break
    return raised
