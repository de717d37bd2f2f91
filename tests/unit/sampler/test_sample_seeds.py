"""What seeds a sample: the run's seed, the step, the prompt's place and the sample's, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.rollout import Response, TokenIds, WeightsVersion
from tepo_megatron.run.step.minibatches import derive_seed
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.sampler.sampling import Sample

VERSION = WeightsVersion(0)


class Client:
    """Notes the seed of every sample that is asked of it: a group's seed + j (decision 006)."""

    def __init__(self, asked: dict[tuple[int, ...], list[int]], pool: ThreadPoolExecutor) -> None:
        self._asked, self.pool = asked, pool

    def draw(self, _name: str, prompt: TokenIds, samples: list[Sample], *_: Any, **__: Any) -> Iterator[tuple[int, Response]]:
        self._asked.setdefault(tuple(prompt.tolist()), []).extend(each.seed for each in samples)
        return ((each.index, Response((each.seed % 50_000,), (-1.0,), "stop", VERSION)) for each in samples)

    def progress(self) -> int:
        return 0

    def close(self) -> None:
        return None


def sample(run_seed: int, step: int, prompts: int, n: int, *, servers: int, at_once: int) -> list[list[int]]:
    """The seeds of each prompt's samples, as the run asks for them of so many servers that take so many sequences at once."""
    asked: dict[tuple[int, ...], list[int]] = {}
    config = ServerConfig(count=servers, max_num_seqs=at_once)
    fleet = Fleet(config, model_dir=Path("model"), dtype="float32", stop_token_ids=(), log_dir=Path("logs"))
    with ThreadPoolExecutor(1) as pool:
        stand_in: Any = fleet
        stand_in._clients = [Client(asked, pool) for _ in range(servers)]
        stand_in._version = VERSION
        stand_in._servers = [SimpleNamespace(healthy=lambda: True)] * servers
        seed = derive_seed(run_seed, step, "rollout")
        groups = fleet.generate([(at,) for at in range(prompts)], n=n, temperature=1.0, max_new_tokens=1, seed=seed)
    found = [asked[at,] for at in range(prompts)]
    assert [[response.response_ids[0] for response in group] for group in groups] == [
        [s % 50_000 for s in one] for one in found
    ]
    return found


@given(
    seed=st.integers(0, 2**31),
    step=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 9)),
    cut=st.tuples(st.integers(1, 3), st.integers(1, 10)),
)
@settings(max_examples=40)
def test_a_samples_seed_does_not_depend_on_who_draws_it(
    seed: int, step: int, sizes: tuple[int, int], cut: tuple[int, int]
) -> None:
    prompts, n = sizes
    one = sample(seed, step, prompts, n, servers=1, at_once=64)
    assert sample(seed, step, prompts, n, servers=cut[0], at_once=cut[1]) == one
    fewer = sample(seed, step, prompts - 1, n, servers=1, at_once=64) if prompts > 1 else []
    assert fewer == one[:-1]


def test_no_two_samples_of_a_run_share_a_seed() -> None:
    seeds = [
        each for run in range(2) for step in range(20) for one in sample(run, step, 5, 8, servers=1, at_once=64) for each in one
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 20 * 5 * 8
    assert all(0 <= each < 2**62 + 8 for each in seeds)
