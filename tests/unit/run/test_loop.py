"""The loop's order, with a recorder in place of engine and servers: real ones run in tests/dist and tests/e2e."""

from __future__ import annotations

import pytest

from tests.support.recorded_loop import STEP, run


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_the_order_of_a_run(shares_gpus: bool) -> None:
    """On shared GPUs it is the same; who may be there when is what the recorder asserts."""
    first = ["ready", "update weights 0", "canary 0", "evaluate 0", "log 0"]
    one = ["collect 0", "noise", *STEP, "save 1", "update weights 1", "canary 1", "log 1"]
    two = ["collect 1", *STEP, "save 2", "update weights 2", "canary 2", "evaluate 2", "log 2"]
    assert run(2, shares_gpus=shares_gpus) == first + one + two


@pytest.mark.parametrize(("noise_every", "measured"), [(0, 0), (1, 4), (2, 2), (3, 2), (50, 1)])
def test_noise_is_measured_in_the_first_step_and_every_so_many(noise_every: int, measured: int) -> None:
    calls = run(4, noise_every=noise_every)
    assert calls.count("noise") == measured
    assert not measured or calls.index("noise") < calls.index("score 3")


def test_a_canary_is_due_by_the_count_of_syncs() -> None:
    """One that a server's death repeats is one sync."""
    calls = run(4, canary=3, dies_at=("update weights 1", "canary 3"))
    assert [call for call in calls if call.startswith("canary")] == ["canary 0", "canary 3", "canary 3"]


def test_a_resumed_run_checks_the_canary_after_the_same_steps() -> None:
    """And at once, since its servers have just started."""
    calls = run(6, canary=3, resumed=2, row=2)
    assert [call for call in calls if call.startswith("canary")] == ["canary 2", "canary 3", "canary 6"]


def test_training_goes_on_beside_a_save_and_the_run_ends_when_it_is_whole() -> None:
    calls = run(3, save_every=2, every=0, canary=0, async_save=True)
    assert [call for call in calls if call.startswith(("save", "update 3", "log"))] == [
        *("log 0", "update 3", "update 3", "log 1"),
        *("update 3", "update 3", "save 2", "log 2"),
        *("update 3", "update 3", "saved 2 meanwhile", "save 3", "log 3", "saved 3"),
    ]


@pytest.mark.parametrize(("save_every", "saved"), [(0, [3]), (2, [2, 3]), (3, [3])])
def test_the_last_step_is_evaluated_and_saved_once(save_every: int, saved: list[int]) -> None:
    calls = run(3, save_every=save_every)
    assert calls[-2:] == ["evaluate 3", "log 3"]
    assert [int(call.split()[1]) for call in calls if call.startswith("save")] == saved


@pytest.mark.parametrize("shares_gpus", [False, True])
def test_a_resumed_run_goes_on_after_the_last_row(shares_gpus: bool) -> None:
    again = ["ready", "update weights 2", "canary 2"]
    assert run(2, resumed=2, row=2, shares_gpus=shares_gpus) == again
    third = ["collect 2", *STEP, "save 3", "update weights 3", "canary 3", "evaluate 3", "log 3"]
    assert run(3, resumed=2, row=2, shares_gpus=shares_gpus) == again + third


@pytest.mark.parametrize("steps", [2, 4])
def test_a_run_that_ended_between_checkpoint_and_row_is_evaluated_when_it_is_resumed(steps: int) -> None:
    calls = run(steps, resumed=2, row=1)
    assert calls[:5] == ["ready", "update weights 2", "canary 2", "evaluate 2", "log 2"]
    assert [call for call in calls if call.startswith("log")] == [f"log {step}" for step in range(2, steps + 1)]


@pytest.mark.parametrize(
    ("dies_at", "expected"),
    [
        (("collect 0",), ["collect 0", "update weights 0", "canary 0", "collect 0"]),
        (("evaluate 1",), ["evaluate 1", "update weights 1", "canary 1", "evaluate 1"]),
        (("update weights 1",), ["update weights 1", "update weights 1", "canary 1"]),
        (("canary 1",), ["update weights 1", "canary 1", "update weights 1", "canary 1", "evaluate 1"]),
        (("collect 0", "update weights 0"), ["collect 0", "update weights 0", "canary 0", "collect 0"]),
        (("wake",), ["update weights 0", "wake", "update weights 0", "canary 0"]),
    ],
)
@pytest.mark.parametrize("shares_gpus", [False, True])
def test_a_server_that_died_gets_the_weights_before_the_work_is_repeated(
    dies_at: tuple[str, ...], expected: list[str], shares_gpus: bool
) -> None:
    calls = run(1, dies_at=dies_at, every=1, shares_gpus=shares_gpus)
    text = " | ".join(calls)
    assert " | ".join(expected) in text
    assert calls.count("log 1") == 1


def test_a_step_with_skipped_updates_is_kept_and_the_run_goes_on() -> None:
    calls = run(2, skips=(2, 3))
    assert [call for call in calls if call.startswith(("keep", "log"))] == [
        "log 0",
        "keep 0 ['update 2']",
        "log 1",
        "keep 1 ['update 3']",
        "log 2",
    ]
