"""The checks of ``tepo doctor --run`` of what a run reads: model folder, problems, verifier. No server is started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

from tepo_megatron.cli.doctor.check import Check, Status
from tepo_megatron.config import RunConfig
from tepo_megatron.config.data import BUILTIN
from tepo_megatron.config.environment import EnvironmentConfig
from tepo_megatron.config.sampling import SamplingConfig


def input_checks(config: RunConfig) -> list[Callable[[], Check]]:
    """Returns the checks of what a run reads, to be called later; none of a replayed run, which samples and scores nothing."""
    if config.rollout.replay is not None:
        return []
    checks: list[Callable[[], Check]] = [partial(_problems, config), partial(_verifier, config)]
    for name, check in zip(("problems", "verifier"), checks, strict=True):
        setattr(check, "__name__", f"_{name}")  # noqa: B010  # what diagnose() calls a check that fails by itself
    return checks


def _problems(config: RunConfig) -> Check:
    """Whether model folder, tokenizer and problems can be read, and prompts leave room for a response."""
    from tepo_megatron.run.sampling.inputs import read_inputs
    from tepo_megatron.tasks.data.builtin import resolve_model_path

    try:
        inputs = read_inputs(config, resolve_model_path(config.model.path))
        if config.rollout.server.max_model_len is not None:
            inputs.spec.check_length(config.rollout.server.max_model_len, "rollout.server.max_model_len")
    except ValueError as error:
        return Check("model and data", "fail", config.model.path, str(error), needed=True)
    counts = f"{len(inputs.train)} problems to train on, {len(inputs.heldout)} held out"
    counts += "".join(f", {len(each.problems)} in {each.name}" for each in inputs.sets)
    left_out = "".join(f"; {notice}" for notice in inputs.left_out)
    advice = ""
    trained = {(problem.prompt, problem.messages) for problem in inputs.train}
    both = sum((problem.prompt, problem.messages) in trained for problem in inputs.heldout)
    if not inputs.heldout and not inputs.sets:
        advice = "nothing is evaluated: give data.heldout to see whether the model gets better"
    elif both:
        advice = f"{both} of the held-out prompts are trained on, too: take them out of one of the two"
    status: Status = "warn" if advice else "ok"
    shown = config.model.path if config.model.path.startswith(BUILTIN) else str(inputs.model_dir)
    return Check("model and data", status, f"{shown}; {counts}{left_out}", advice, needed=True)


def _environment(config: EnvironmentConfig, sampling: SamplingConfig) -> Check:
    """Whether the environment can be made, in a process with the run's limits or on its servers."""
    from tepo_megatron.tasks.environments.environment_task import open_host

    try:
        with closing(open_host(config, sampling)) as host:
            notice = host.notice or ""
    except (ValueError, RuntimeError) as error:
        return Check("environment", "fail", config.name, str(error), needed=True)
    return Check("environment", "ok", f"{config.name} can be made", notice, needed=True)


def _verifier(config: RunConfig) -> Check:
    """Whether the verifier scores answers of the data, in a process with the run's limits."""
    from tepo_megatron.run.sampling.step_rewards import rehearsed
    from tepo_megatron.tasks.data.problems import load_problems
    from tepo_megatron.tasks.reward.verifier_task import VerifierTask, reward_configs

    if config.environment is not None:
        return _environment(config.environment, config.rollout.sampling)
    try:
        problems = [
            replace(problem, source=source.called) for source in config.data.train_sources for problem in load_problems(source)
        ]
        rehearsed(VerifierTask(reward_configs(config.reward, config.data)), config, problems).close()
    except (ValueError, RuntimeError) as error:
        return Check("verifier", "fail", config.reward.verifier, str(error), needed=True)
    names = dict.fromkeys(source.verifier or config.reward.verifier for source in config.data.train_sources)
    paths = ", ".join(source.path for source in config.data.train_sources)
    return Check("verifier", "ok", f"{', '.join(names)} scores answers of {paths}", needed=True)
