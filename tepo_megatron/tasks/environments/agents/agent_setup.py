"""What a process that runs agents is told of the run's configuration."""

from __future__ import annotations

from typing import Any

from tepo_megatron.config.environment import OUTSIDE, AgentConfig, EnvironmentConfig
from tepo_megatron.config.sampling import SamplingConfig
from tepo_megatron.tasks.environments.keys import make_key
from tepo_megatron.tasks.reward.verifiers import resolve_verifier


def shared_setup(settings: AgentConfig, sampling: SamplingConfig | None) -> dict[str, Any]:
    """What decides how an agent's episode goes, as JSON values. ``sampling``: how the run draws; None: as by default."""
    drawn = sampling or SamplingConfig()
    return {
        "history": settings.history,
        "ignore": list(settings.ignore),
        "verifier": settings.verifier,
        "tool_calls": settings.tool_calls,
        "max_request_mb": settings.max_request_mb,
        "sampling": {
            "temperature": drawn.temperature,
            "top_p": drawn.top_p,
            "top_k": drawn.top_k,
            "min_p": drawn.min_p,
            "stop": list(drawn.stop),
        },
    }


def agent_setup(config: EnvironmentConfig, sampling: SamplingConfig | None) -> dict[str, Any] | None:
    """The same with what belongs to one machine; None where the environment is no agent. Writes the key of agents outside if
    there is none.

    Raises ValueError: an unknown verifier, or a key that others can read.
    """
    if config.adapter != "agent":
        return None
    settings = config.agent_settings
    outside = settings.key_file if config.name == OUTSIDE else None
    return {
        **shared_setup(settings, sampling),
        # A file by its whole path: the process may look for it from another folder.
        "verifier": None if settings.verifier is None else resolve_verifier(settings.verifier),
        "port": settings.port,
        "key": None if outside is None else make_key(outside, "environment.agent.key_file"),
    }
