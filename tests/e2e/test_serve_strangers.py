"""``tepo serve`` with a real vLLM server, which no trainer uses yet, and another user who tries its port and its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support import stranger
from tests.support.kills import RUN
from tests.support.processes import assert_none_names
from tests.support.programs import TIMEOUT_S
from tests.support.server_routes import assert_routes_need_the_key
from tests.support.sockets import family, listeners, unix_sockets


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_node_that_serves_gives_a_stranger_nothing(tmp_path: Path) -> None:
    registry, out = tmp_path / "servers", tmp_path / "out"
    tmp_path.chmod(0o755)  # so that it is the registry itself that keeps the key
    given = ["placement=external", f"registry={registry}", "interface=lo"]
    command = [sys.executable, "-m", "tepo_megatron", "serve", str(RUN), f"output={out}"]
    command += [f"rollout.server.{each}" for each in given]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(registry.glob("server-*.json")):
            assert process.poll() is None, (tmp_path / "printed").read_text()
            assert time.monotonic() < deadline, "no server registered"
            time.sleep(0.1)
        (key_file,) = [path for path in registry.iterdir() if path.is_file() and path.suffix != ".json"]
        key = key_file.read_text()
        assert {each.address for each in listeners(process.pid)} == {"127.0.0.1"}
        (port,) = {each.port for each in listeners(process.pid) if "api_server" in each.program}
        assert_routes_need_the_key(f"http://127.0.0.1:{port}")
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)
        assert answer.status_code == 200
        ports = {each.port for each in listeners(process.pid)}
        assert stranger.ask("poison_stores", tmp_path / "proof", *ports) == []
        environments = [f"/proc/{each.pid}/environ" for each in family(process.pid)]
        assert stranger.ask("read_files", key_file, *unix_sockets(process.pid), *environments, RUN) == [str(RUN)]
        assert not any(key.encode() in Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in family(process.pid))
        holders = [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
        assert holders == [key_file]
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()
        assert_none_names(out)
