"""What a run tells its heartbeats: how long each phase may take by its own time-outs, and how it ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tepo_megatron.config import RunConfig
from tepo_megatron.errors import describe
from tepo_megatron.runtime.watch.heartbeat import Heartbeat

STATUS = "status"
"""Folder of the output folder that has a heartbeat of each rank."""


def make_heartbeat(config: RunConfig) -> Heartbeat:
    """This rank's, not started."""
    return Heartbeat(
        config.output / STATUS,
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
        hang_timeout_s=config.train.hang_timeout_s,
        limits=phase_limits(config),
    )


def phase_limits(config: RunConfig) -> dict[str, float]:
    """Phase → seconds in which a rank may wait for servers or verifiers without a sign: these have time-outs of their own, and
    only after them is it the rank that hangs. While servers sample, every token that they make is a sign.
    """
    server, reward = config.rollout.server, config.reward
    servers = server.longest_wait_s
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    verdicts = responses * reward.timeout_s / reward.workers
    silent = server.request_timeout_s
    return {"servers": servers, "rollout": silent, "sync": servers, "reward": verdicts, "eval": silent + verdicts}


@contextlib.contextmanager
def told_at_the_end(heartbeat: Heartbeat) -> Iterator[None]:
    """Within, the run goes on; the heartbeat's last word is how it ended."""
    try:
        yield
    except KeyboardInterrupt:
        heartbeat.close("interrupted")
        raise
    except BaseException as error:
        heartbeat.close(f"failed: {describe(error)}")
        raise
    heartbeat.close("finished")
