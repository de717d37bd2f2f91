"""Verifiers that do what a response says, for worker processes: imports nothing heavy."""

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tepo_megatron.core.problem import Problem, ResponseText

kept: list[Any] = []


def tries() -> Path:
    """It has a line ``PID RESPONSE`` for each response that a verifier received."""
    return Path(os.environ["TRIES"])


def judge(problem: Problem, response: ResponseText) -> Any:
    """The response is a word and perhaps a number; what is only a number is the reward, times the problem's factor."""
    with tries().open("a") as file:
        file.write(f"{os.getpid()} {response}\n")
    what, _, size = response.partition(" ")
    match what:
        case "raise":
            return int("no number")
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die-once":
            if len([line for line in tries().read_text().splitlines() if line.endswith("die-once")]) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "abort":
            os.abort()
        case "spin":
            while True:
                pass
        case "hold":  # backtracking holds the interpreter's lock
            re.match(r"(a|a)*b", "a" * 60)
        case "sleep":
            time.sleep(600)
        case "until":
            while not tries().with_suffix(".go").exists():
                time.sleep(0.01)
        case "child":
            kept.append(subprocess.Popen(["sleep", "1000"]))
            tries().with_suffix(".child").write_text(str(kept[-1].pid))
            time.sleep(600)
        case "memory":
            return len(bytearray(int(size)))
        case "keep":
            kept.append(bytearray(int(size)))
        case "file":
            tries().with_suffix(".large").write_bytes(bytes(int(size)))
        case "files":
            kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(int(size)))
        case "core":
            return resource.getrlimit(resource.RLIMIT_CORE)[1]
        case "connect":
            socket.create_connection(("127.0.0.1", int(size))).close()
        case "name":
            socket.getaddrinfo("example.invalid", 80)
        case "owner":
            return os.getuid() == int(size) == tries().stat().st_uid
        case "print":
            print(size or "noise on stdout", flush=True)
        case "read":
            return len(sys.stdin.read())
        case "pid":
            return os.getpid()
        case "hash":
            return hash("a") % 2**40
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "bool": True}
    if what in values:
        return values[what]
    return float(what) * problem.metadata.get("factor", 1) if what[0] in "-0123456789" else 1.0


async def judge_async(problem: Problem, response: ResponseText) -> Any:
    """The same, which may also wait where others go on."""
    await asyncio.sleep(600 if response == "late" else 0)
    return judge(problem, response)


def three(problem: Problem, response: str, third: Any) -> float:
    return 1.0


def score_group(problem: Problem, responses: list[str]) -> list[dict[str, float]]:
    """The rank of each in its group, and the group's size."""
    numbers = [float(item) for item in responses]
    return [{"rank": float(sorted(numbers).index(number)), "size": len(numbers)} for number in numbers]
