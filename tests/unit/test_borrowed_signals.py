"""Signals in a process that is the user's own: they stop the run, and afterwards are handled as before."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tepo_megatron.runtime.preemption import STOP_SIGNALS, StopRequested, StopSignals, stop_signals
from tests.support.programs import TIMEOUT_S


def test_a_signal_asks_for_a_stop_and_a_second_ctrl_c_interrupts() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    outer, threads = stop_signals(), set(threading.enumerate())
    signal.set_wakeup_fd(wakes := signal.set_wakeup_fd(-1))
    said: list[str] = []
    with StopSignals(ends=False).borrowed() as signals:
        assert stop_signals() is signals
        signals.say = said.append
        with pytest.raises(StopRequested):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.defer()
        with pytest.raises(KeyboardInterrupt) as caught:
            os.kill(os.getpid(), signal.SIGINT)
        assert not isinstance(caught.value, StopRequested)
        assert signals.requested == signal.SIGTERM
        deadline = time.monotonic() + TIMEOUT_S
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said == ["SIGTERM: the run saves and ends"]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert stop_signals() is outer
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakes)
    assert found == wakes
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left  # threads of earlier tests in this process may end at any time


def test_in_another_thread_no_signal_is_touched() -> None:
    found = []

    def work() -> None:
        with StopSignals(ends=False).borrowed():
            found.append([signal.getsignal(number) for number in STOP_SIGNALS])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[signal.getsignal(number) for number in STOP_SIGNALS]]
