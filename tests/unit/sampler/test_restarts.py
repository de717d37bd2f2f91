"""Servers that do not come up again, or later than others."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tepo_megatron.core.rollout import WeightsVersion
from tests.support.faulty_server import FaultyServer, Sender, fleet_of


class Broken(FaultyServer):
    """Comes up at the starts in ``works`` only."""

    works: tuple[int, ...] = (1,)
    error: type[Exception] = RuntimeError

    def wait_ready(self) -> None:
        if self.starts not in self.works:
            self.alive = False
            raise self.error(f"the vLLM server at {self.url} ended before it was ready")


@pytest.mark.parametrize("error", [RuntimeError, OSError])
@pytest.mark.parametrize(("works", "restarts", "ends"), [((1, 3), 2, ""), ((1,), 3, "died 4 times")])
def test_a_restart_that_fails_is_repeated_as_often_as_allowed(
    tmp_path: Path, works: tuple[int, ...], restarts: int, ends: str, error: type[Exception]
) -> None:
    server = Broken()
    server.works, server.error = works, error
    with fleet_of([server], tmp_path, max_restarts=3) as (fleet, _):
        server.alive = False
        if ends:
            with pytest.raises(RuntimeError, match=rf"{ends}; rollout.server.max_restarts = 3(?s:.*)ended before it was ready"):
                fleet.revive()
        else:
            assert fleet.revive()
        assert fleet.figures()["servers/restarts"] == restarts
    server.close()


def test_no_rank_waits_for_an_update_that_a_system_error_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, tensors = FaultyServer(), iter(range(3))
    sender: Any = Sender(server.calls)
    with fleet_of([server], tmp_path) as (fleet, _):
        monkeypatch.setattr(fleet, "_take_back", Mock(side_effect=OSError("Stale file handle")))
        with pytest.raises(OSError, match="Stale"):
            fleet.update_weights_from_tensors(WeightsVersion(1), [], tensors)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="Stale"):
            fleet.update_weights_from_shards(WeightsVersion(1), sender)
    assert (list(tensors), server.calls[-1]) == ([], "arrived: False")
    server.close()


class Loading(Broken):
    """Is healthy once it is ready, and at its second start is not ready before another has failed."""

    works = (1, 2)
    is_ready = False

    def start(self, taken: Any = ()) -> None:
        self.is_ready = False
        super().start(taken)

    def wait_ready(self) -> None:
        if self.starts == 2 in self.works:
            time.sleep(0.3)
        super().wait_ready()
        self.is_ready = True

    def healthy(self) -> bool:
        return self.alive and self.is_ready


def test_servers_that_load_while_the_start_of_another_fails_are_let_finish(tmp_path: Path) -> None:
    servers = [Loading() for _ in range(3)]
    servers[1].works = (1, 3)
    with fleet_of(list[FaultyServer](servers), tmp_path, max_restarts=2) as (fleet, _):
        fleet._end()
        assert fleet.revive()
        assert [server.starts for server in servers] == [2, 3, 2]
    for server in servers:
        server.close()
