"""Tokenizer, problems and replayed rollouts, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.callbacks import Callbacks
from tepo_megatron.run.output.resume import resumes
from tepo_megatron.run.sampling.step_rewards import GroupFilters
from tepo_megatron.sampler.rollout_file import Record, check_rollouts, record_path
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.sources import TOO_LONG, ProblemSampler, Source
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.environments.episodes import opening_of
from tepo_megatron.tasks.environments.worker import resolve_environment
from tepo_megatron.tasks.evaluate.evaluation import EvaluationSet
from tepo_megatron.tasks.reward.verifier_task import VerifierTask
from tepo_megatron.tasks.reward.verifiers import check_reachable, resolve_verifier
from tepo_megatron.trainer.checkpoint_folder import checkpoints, step_of
from tepo_megatron.trainer.protocol import check_plugins
from tepo_megatron.weights.architecture import ModelSpec, read_model_spec


@dataclass(frozen=True)
class Inputs:
    """``left_out``: source → number of unused problems and why; ``sets``: besides ``heldout``."""

    model_dir: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    train: list[Problem]
    order: ProblemSampler
    heldout: list[Problem]
    left_out: list[str]
    sets: Sequence[EvaluationSet] = ()

    @classmethod
    def read(cls, config: RunConfig, model_dir: Path, *, has_reward: bool = False) -> Inputs:
        """``has_reward``: the verifier is an object. Raises ValueError."""
        config.require_data()
        check_plugins(config)
        tokenizer = load_tokenizer(model_dir, config.data.chat_template_kwargs)
        tokenizer.check_model()
        if config.environment is not None:
            resolve_environment(config.environment.name)
            opening_of(config.environment, tokenizer)
        rewards = VerifierTask.configs(config.reward, config.data)
        if has_reward or config.environment is not None:
            del rewards[""]
        for reward in rewards.values():
            resolve_verifier(reward.verifier)
        GroupFilters(config.rollout)
        Callbacks.check(config)
        replay = config.rollout.replay
        if replay is not None and not replay.is_dir():
            where = f"rollout.replay = {replay}"
            raise ValueError(f"{where} is not a folder; give one that a run with rollout.record=true has written")
        spec = read_model_spec(model_dir)
        if replay is not None:
            _check_replay(config, replay, spec)
        train = Source.read_all(config.data, "train", tokenizer)
        evaluate, is_evaluated = config.evaluate, config.evaluate.every and config.data.heldout is not None
        heldout = Source.read_all(config.data, "heldout", tokenizer) if is_evaluated else []
        left_out = [notice for source in (*train, *heldout) for notice in source.notices]
        for source in train if replay is None else ():
            judge = rewards.get(source.name) or rewards.get("")
            if judge is not None and (lost := check_reachable(judge.verifier, source.used)):
                refused = f"{lost} problems whose own answer {judge.verifier} refuses"
                left_out.append(f"{source.path}: {refused}: no response solves them")
        if replay is None:
            tokenizer.check_sampling(config.rollout.sampling, (problem for source in train for problem in source.used))
        limit = config.rollout.server.max_model_len or spec.max_positions
        sizes = [size for source in (*train, *heldout) for size in source.sizes]
        config.rollout.check_room(sizes, limit)
        if replay is None:
            _check_teachers(config, limit, max(size for source in train for size in source.sizes)[0])
        names = [name for name in evaluate.sets if evaluate.every_of(name) and replay is None]
        sets = EvaluationSet.load_all(config, tokenizer, names, limit)
        left_out += [f"{chosen.name}: {chosen.left_out} left out, {TOO_LONG}" for chosen in sets if chosen.left_out]
        problems, unseen = ([problem for source in sources for problem in source.used] for sources in (train, heldout))
        seen = [*problems, *unseen, *(problem for chosen in sets for problem in chosen.problems)]
        if config.data.chat_template_kwargs and config.environment is None and not any(problem.messages for problem in seen):
            raise ValueError(
                "data.chat_template_kwargs does nothing for plain prompts; set data.chat_template, or leave it out"
            )
        role = config.environment and config.environment.role
        if role and any(problem.messages for problem in [*problems, *unseen]):  # sets are answered in one turn
            tokenizer.turn_ids([(role, "?")], ended=True)  # before anything starts: a template may refuse it, or leave it out
        order = ProblemSampler.of(problems, config.data, config.seed)
        return cls(model_dir, spec, tokenizer, problems, order, unseen, left_out, sets)

    @cached_property
    def by_id(self) -> Mapping[str, Problem]:
        return {problem.id: problem for problem in self.train}


def read_replay(config: RunConfig, vocab_size: int, step: int) -> list[Rollout]:
    """Raises ValueError with file and line."""
    folder, rollout = config.rollout.replay, config.rollout
    assert folder is not None, "the run samples its rollouts"
    rollouts = Record.read(folder, step).rollouts
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    path, stalest = record_path(folder, step), config.most_stale(step)
    check_rollouts(path, rollouts, step=step, prompts=prompts, samples=samples, vocab_size=vocab_size, stalest=stalest)
    return rollouts


def _check_replay(config: RunConfig, folder: Path, spec: ModelSpec) -> None:
    """The first record must have the token masks for scoring, and this model's experts if replayed."""
    first, chosen = 0, config.train.resume_from
    if resumes(config):
        saved = checkpoints(config.output / "checkpoints") if chosen is None else [Path(chosen)]
        first = step_of(saved[-1]) if saved else 0
    missing = [step for step in range(first, config.train.steps) if not record_path(folder, step).is_file()]
    if missing:
        raise ValueError(
            f"rollout.replay = {folder} has no record of step {missing[0]} ({record_path(folder, missing[0]).name}), and "
            f"{len(missing)} of the steps {first} to {config.train.steps - 1} are missing; lower train.steps, or record them"
        )
    if first >= config.train.steps:
        return
    for line, rollout in enumerate(read_replay(config, spec.vocab_size, first), start=2):
        if rollout.reward is None:  # not trained on, and maybe without a token
            continue
        where = f"{record_path(folder, first)}, line {line}: the rollout"
        if config.rollout.sampling.truncates and rollout.sampling_mask is None:
            raise ValueError(
                f"{where} has no sampling mask, but rollout.sampling.top_k says that its tokens were drawn from a part of the "
                "vocabulary; record the steps again with these settings, or leave top_k, top_p, min_p and bad_words out if "
                "they were drawn from all of it"
            )
        tokens = rollout.prompt_ids.size + rollout.response_ids.size
        if config.rollout.server.routing_replay and (fault := spec.routes_fault(rollout.routed_experts, tokens)):
            raise ValueError(
                f"{where} {fault}; record the steps again with rollout.server.routing_replay = true, or leave it out"
            )


def _check_teachers(config: RunConfig, limit: int, longest: int) -> None:
    most = longest + config.rollout.sampling.max_new_tokens if config.environment is None else limit
    for name, teacher in config.teachers.items():
        served = teacher.served.max_model_len if teacher.place == "server" else None
        room = served or read_model_spec(resolve_model_path(teacher.path)).max_positions
        # a server scores a response only if its model could write one more token
        allowed = room - 1 if teacher.place == "server" else room
        if most > allowed:
            raise ValueError(
                f"teachers.{name} takes {room} tokens, and scores responses of at most {allowed}, prompts included; here they "
                f"may have {most}: lower rollout.sampling.max_new_tokens, or rollout.server.max_model_len to {allowed} with an "
                "environment"
            )
