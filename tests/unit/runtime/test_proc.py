"""What is read from /proc, of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tepo_megatron.runtime.proc import STOPPED, Process
from tests.support.programs import TIMEOUT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_processes_are_seen_with_their_state() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            end = time.monotonic() + TIMEOUT_S
            while Process.read(child.pid).state != STOPPED:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert child.pid in [state.pid for state in Process.children(os.getpid())]
            assert child.pid in [state.pid for state in Process.below(os.getpid())]
            assert child.pid in Process.in_group(os.getpgrp())
            assert "time.sleep(600)" in Process.command_line(child.pid)
        finally:
            child.kill()
    assert Process.read(child.pid) is None
    assert Process.start_time(child.pid) == 0
    assert Process.read(os.getpid()).cpu_s > 0
