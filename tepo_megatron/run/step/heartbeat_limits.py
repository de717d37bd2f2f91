"""How long each phase of a run may take by its own time-outs, for heartbeats, and how the run ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tepo_megatron.config import RunConfig
from tepo_megatron.errors import describe
from tepo_megatron.runtime.watch.heartbeat import Heartbeat

STATUS = "status"


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
    """Phase → seconds without progress that its own time-outs allow a rank. While servers sample, every token is progress."""
    server, reward = config.rollout.server, config.reward
    servers = server.longest_wait_s
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    verdicts = responses * reward.timeout_s / reward.workers
    silent = server.request_timeout_s
    return {"servers": servers, "rollout": silent, "sync": servers, "reward": verdicts, "eval": silent + verdicts}


@contextlib.contextmanager
def told_at_the_end(heartbeat: Heartbeat) -> Iterator[None]:
    """Context of the run; the last heartbeat says how it ended."""
    try:
        yield
    except KeyboardInterrupt:
        heartbeat.close("interrupted")
        raise
    except BaseException as error:
        heartbeat.close(f"failed: {describe(error)}")
        raise
    heartbeat.close("finished")
