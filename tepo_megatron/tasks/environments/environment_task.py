from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

from tepo_megatron.config import RunConfig
from tepo_megatron.config.reward import OUTSIDE, EnvironmentConfig
from tepo_megatron.config.rollout import SamplingConfig
from tepo_megatron.core.problem import Problem, ResponseText
from tepo_megatron.core.rollout import Response, Rollout
from tepo_megatron.runtime.text import valid_text
from tepo_megatron.sampler.protocol import Sampler, SampleStream
from tepo_megatron.sampler.sampling import Sampling, prompt_seed
from tepo_megatron.tasks.data.tokenizer import Tokenizer
from tepo_megatron.tasks.environments.episodes import Episode, EpisodeStream, Observations, episode_prompt
from tepo_megatron.tasks.environments.protocol import EnvironmentHost
from tepo_megatron.tasks.environments.service import RemoteEnvironments
from tepo_megatron.tasks.environments.workers import EnvironmentWorkers
from tepo_megatron.tasks.protocol import Generate, RewardResult, Task
from tepo_megatron.tasks.reward.pool import weigh
from tepo_megatron.tasks.reward.verifier_task import VerifierTask
from tepo_megatron.weights.architecture import ModelSpec

_MAX_RESULTS = 1 << 16

_REHEARSAL_PROBLEMS = 4
_UNKNOWN_RESULT = "its episode was played before the interruption, and what came of it is not known any more"


class EnvironmentTask(Task):
    """``submit`` and ``score`` look up rewards of ended episodes. ``max_length``: tokens of prompt and turns."""

    verifier = None
    scores_groups = False

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, vocab_size: int, max_length: int) -> None:
        environment, weights = config.environment, config.reward.weights
        assert environment is not None, "the run has no environment"
        self.config, self._tokenizer, self._environment = config, tokenizer, environment
        self._sizes = vocab_size, max_length
        self.components: tuple[str, ...] | None = None if weights is None else tuple(weights)
        self._results: OrderedDict[tuple[str, bytes], deque[RewardResult]] = OrderedDict()
        """By problem and tokens: equal episodes may exchange rewards."""
        self._most = _MAX_RESULTS
        self._taken: dict[tuple[str, bytes], RewardResult] = {}
        self._finished: list[tuple[Hashable, RewardResult]] = []
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._numbers = count()  # never reused: an ended episode may still be answered
        if environment.special_tokens:
            tokenizer.encode("", special_tokens=True)  # refuses what the tokenizer cannot do
        template = environment.agent_settings.chat_template
        self._observations = Observations(tokenizer, vocab_size, template, environment.special_tokens, environment.role)
        self.host = self.open_host(environment, config.rollout.sampling)

    @staticmethod
    def open_host(config: EnvironmentConfig, sampling: SamplingConfig) -> EnvironmentHost:
        return RemoteEnvironments(config, sampling) if config.servers else EnvironmentWorkers(config, sampling)

    @property
    def notice(self) -> str | None:
        return self.host.notice

    @property
    def unfinished(self) -> int:
        return len(self._finished)

    def stream(self, inner: SampleStream, problem_of: Callable[[Any], Problem]) -> EpisodeStream:
        game = (self._observations, self._environment, self._sizes[1])
        return EpisodeStream(inner, self.host, problem_of, *game, self.note, self._numbers)

    def heldout_generate(self, generate: Generate, fleet: Sampler, problems: Sequence[Problem], **settings: Any) -> Generate:
        return partial(self._generate, fleet, problems, **settings)

    def _generate(
        self,
        fleet: Sampler,
        problems: Sequence[Problem],
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        on_progress: Callable[[int, int], None] | None = None,
        on_move: Callable[[], None] = lambda: None,
        **truncation: Any,
    ) -> list[list[Response]]:
        """``max_new_tokens``: per turn. ``truncation``: more fields of ``Sampling``."""
        groups: list[dict[int, Response]] = [{} for _ in prompts]
        self._most = max(self._most, _MAX_RESULTS + n * len(prompts))  # they are looked up when all are played
        inner = fleet.sample_stream(Sampling(temperature, max_new_tokens, **truncation), on_move=on_move)
        counted = self._counts.copy()  # a row counts only the step's episodes
        try:
            with self.stream(inner, lambda index: problems[index]) as stream:
                for index in range(len(prompts)):
                    prompt = episode_prompt(self._environment, self._tokenizer, problems[index])
                    stream.submit(index, prompt, prompt_seed(seed, index), n)
                while stream.unfinished:
                    if (finished := stream.next(None)) is not None:
                        groups[finished[0]][finished[1]] = finished[2]
                        if len(groups[finished[0]]) == n and on_progress is not None:
                            on_progress(sum(len(group) == n for group in groups), len(prompts))
        finally:
            self._counts = counted
        return [[group[index] for index in range(n)] for group in groups]

    def note(self, episode: Episode, response: Response) -> None:
        self._counts["episodes"] += 1
        for name in ("tool_errors", "restarts", "new_histories", "seconds"):
            self._counts[name] += getattr(episode, name)
        key = _key(episode.problem, response.response_ids.tobytes())
        self._results.setdefault(key, deque()).append(self._result(episode, response))
        while len(self._results) > self._most:
            self._results.popitem(last=False)

    def submit(self, key: Hashable, problem: Problem, response: str, *, group: Hashable = None, group_size: int = 1) -> None:
        """``response`` must come from this task's stream."""
        self._finished.append((key, self._take(problem, response)))

    def poll(self, timeout_s: float | None = 0.0) -> list[tuple[Hashable, RewardResult]]:
        finished, self._finished = self._finished, []
        return finished

    def reset(self) -> None:
        self._finished.clear()

    def rehearse(self, problems: Sequence[Problem]) -> None:
        """Begins an episode, except with external agents. Raises ValueError if none of the first problems' begins."""
        errors: list[str] = []
        for problem in problems[: _REHEARSAL_PROBLEMS if self._environment.name != OUTSIDE else 0]:
            number = next(self._numbers)
            self.host.call(number, ["reset", problem.to_json(), self.config.seed, False])
            while not (answers := self.host.poll(self._environment.timeout_s)) and self.host.busy:
                continue
            try:
                for answer in answers:
                    if why := answer.error or answer.lost:
                        raise ValueError(why)
                    self._observations.ids(answer.answer["observation"], ended=None, chat=problem.messages)
            except ValueError as error:
                errors.append(str(error))
                self.host.end(number)
                continue
            if self._environment.adapter == "agent":
                # An agent would be refused its next answer, and may print that as an error.
                self.host.close()
                self.host = self.open_host(self._environment, self.config.rollout.sampling)
            else:
                self.host.end(number)
            return
        if errors:
            raise ValueError(
                f"environment.name = {self._environment.name!r} cannot begin an episode of the first {len(errors)} problems: "
                f"{errors[0]}; correct the environment, or the data"
            )

    def take_figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        counts, self._counts = self._counts, defaultdict(float)
        turns = super().take_figures(rollouts) or {"environment/turns": 1.0, "environment/tokens": 0.0}
        if not (episodes := counts["episodes"]):
            return turns
        figures = {
            "environment/tool_errors": counts["tool_errors"] / episodes,
            "environment/restarts": counts["restarts"],
            "environment/seconds": counts["seconds"] / episodes,
        }
        if self._environment.adapter == "agent":
            figures["environment/new_histories"] = counts["new_histories"] / episodes
        return turns | figures

    def another(self) -> EnvironmentTask:
        return EnvironmentTask(self.config, self._tokenizer, *self._sizes)

    def close(self) -> None:
        self.host.close()

    def _take(self, problem: Problem, response: str) -> RewardResult:
        text = response if isinstance(response, ResponseText) else ResponseText(response)
        key = _key(problem, text.packed_ids)
        if not (waiting := self._results.get(key)):
            # asked again, since a teacher's judgement was lost with a server
            return self._taken.get(key) or RewardResult(None, f"problem {problem.id!r}: {_UNKNOWN_RESULT}")
        self._taken[key] = waiting.popleft()
        if not waiting:
            del self._results[key]
        while len(self._taken) > _MAX_RESULTS:
            self._taken.pop(next(iter(self._taken)))
        return self._taken[key]

    def _result(self, episode: Episode, response: Response) -> RewardResult:
        error = episode.error
        if error is None:
            value, names = episode.reward, self.components
            if value == 0.0 and names:  # no turn was rated, for example because of a limit
                value = dict.fromkeys(names, 0.0)
            elif isinstance(value, Mapping) and names != ():  # a limit may have come before the turn that rates the others
                value, names = {**dict.fromkeys(names or (), 0.0), **value}, None
            try:
                reward, parts = weigh(value, self.config.reward.weights, names)
            except ValueError as wrong:
                error = str(wrong).replace("the verifier", "the environment")
            else:
                if parts or value:
                    self.components = tuple(parts)
                return RewardResult(reward, parts=parts, seconds=episode.seconds)
        failed = self.config.reward.failed_reward if response.model_tokens else None  # without tokens nothing can be learnt
        return RewardResult(failed, valid_text(f"problem {episode.problem.id!r}: {error}"), seconds=episode.seconds)


def _key(problem: Problem, packed_ids: bytes) -> tuple[str, bytes]:
    return problem.id, blake2b(packed_ids, digest_size=16).digest()  # the ids themselves would fill gigabytes


def open_task(config: RunConfig, tokenizer: Tokenizer, spec: ModelSpec, custom: Any = None) -> VerifierTask | EnvironmentTask:
    """``custom``: a verifier that is an object of this process."""
    if config.environment is None or config.rollout.replay is not None:
        return VerifierTask(config.reward, config.data, custom=custom)
    return EnvironmentTask(config, tokenizer, spec.vocab_size, config.rollout.server.max_model_len or spec.max_positions)
