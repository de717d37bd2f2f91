"""The cause of a server's end, found in excerpts of logs that vLLM 0.32 wrote (frames cut, folders renamed)."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.vllm.server import Server

LOGS = Path(__file__).parent / "vllm_logs"


def first_error(lines: list[str]) -> list[str]:
    """The error that a server shows of a log."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.write_text("\n".join(lines))
        shown = Server(ServerConfig(), model_dir=Path("m"), dtype="float32", cores="0", key="k", log=log).log_end(1).split("\n")
    return [line.removeprefix("  ") for line in shown[1 : shown.index(f"The last lines of {log}:")]]


def read(name: str) -> list[str]:
    return (LOGS / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "impossible_tp",
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
                "  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3).",
                "    For further information visit",
            ],
        ),
        (
            "damaged_weights_two_workers",
            ["safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata"],
        ),
        ("no_memory", ["OSError: [Errno 12] Cannot allocate memory"]),
        ("unknown_argument", ["api_server.py: error: unrecognized arguments: --no-such-flag"]),
        ("healthy", []),
    ],
)
def test_the_first_error_of_a_real_log_is_its_cause(name: str, expected: list[str]) -> None:
    found = first_error(read(name))
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


@given(st.data())
def test_tracebacks_that_are_written_through_one_another_are_told_apart(data: st.DataObject) -> None:
    log = read("damaged_weights_two_workers")
    first, second = ([line for line in log if line.startswith(f"(Worker_TP{rank} ")] for rank in (1, 0))
    mixed: list[str] = []
    while first or second:
        source = first if not second or (first and data.draw(st.booleans())) else second
        mixed.append(source.pop(0))
    (found,) = first_error(mixed)
    assert found.startswith("safetensors._safetensors_rust.SafetensorError: Error while deserializing header")


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1, in f']
CORE = "(EngineCore pid=7) ERROR 11-25 16:00:00 [core.py:1] "
SUMMARY = [
    "Traceback (most recent call last):",
    '  File "/venv/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup',
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
]
DIED = "(EngineCore pid=9) ERROR 11-21 23:05:17 [multiproc_executor.py:287] Worker proc VllmWorker-0 died unexpectedly"
ENDED = "terminate called after throwing an instance of 'std::system_error': error: Resource temporarily unavailable"
CHAIN = [*TRACEBACK, "KeyError: 'w'", "", "The above exception was the direct cause of the following exception:", ""]
CHAIN += [*TRACEBACK, "    raise", "RuntimeError: layer 3 has no weight 'w'", *TRACEBACK, "ValueError: a consequence"]
RESOURCES, EXPIRED = "triton.runtime.errors.OutOfResources: out of resource: shared memory", "subprocess.TimeoutExpired: nvcc"


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (CHAIN, "RuntimeError: layer 3 has no weight 'w'"),
        # an exception of another name
        *(([*TRACEBACK, error, "ValueError: a consequence"], error) for error in (RESOURCES, EXPIRED)),
        *(([CORE + line for line in ["failed to start.", *TRACEBACK, error]], error) for error in (RESOURCES, EXPIRED)),
        # what vLLM says of its other processes, only where those say nothing
        (SUMMARY, SUMMARY[-1]),
        ([DIED, *SUMMARY], SUMMARY[-1]),
        ([DIED, ENDED, *SUMMARY], ENDED),
        ([*SUMMARY, "(Worker pid=3) ERROR 11-21 23:05:17 [worker.py:3] the GPU fell off the bus"], "the GPU fell off the bus"),
        # a log that ends within a traceback
        ([CORE + "EngineCore failed", "Traceback (most recent call last):", "  File"], "EngineCore failed"),
    ],
)
def test_of_several_errors_the_cause_is_shown(log: list[str], shown: str) -> None:
    assert first_error(log) == [shown]


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=60), max_size=20))
def test_any_text_is_read(lines: list[str]) -> None:
    lines = [part for line in lines for part in line.splitlines()]
    assert all(any(line in given for given in lines) for line in first_error(lines))
