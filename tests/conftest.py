"""For all tests."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # until all tests are collected: imports make a million objects

# Two shared cores: how long an example takes, or its making, says nothing. The same examples every time, so that a failure of
# CI is one of the change; --hypothesis-profile=default looks for new ones.
settings.register_profile("shared_machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# make test-fast: enough examples to see a slip of the hand. What a test itself asks for stands.
settings.register_profile("fast", parent=settings.get_profile("shared_machine"), max_examples=10)
settings.register_profile("interpreter", parent=settings.get_profile("shared_machine"), max_examples=20)
settings.load_profile("shared_machine")

# Tensors here are small: threads that wait for one another would take most of the time, above all where tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

# What a user's shell, or a service of CI, says to programs: colours, widths, a proxy, a job.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "TERMINAL_WIDTH", "HF_HUB_OFFLINE"):
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[name]
os.environ["NO_PROXY"] = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))

# nohup and a script's & ignore some signals, and runs leave those ignored; tests send them to the processes that they start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Processes that tests start import this checkout, and tests.support, as the tests do by pytest's `pythonpath`.
ROOT = str(Path(__file__).parents[1])
if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != ROOT:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Called where there are several workers (-n)."""
    from tests.support.schedule import Schedule

    gc.enable()  # this process collects no tests
    config.option.loadscopereorder = False  # xdist's own order: files with the most tests first
    return Schedule(config, log)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # libraries and collected tests, which all stay
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.support.schedule import longest_first

        items[:] = longest_first(items)
