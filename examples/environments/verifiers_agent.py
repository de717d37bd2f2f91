"""An environment of `verifiers` (0.4) as an agent. `python verifiers_agent.py > problems.jsonl` writes its problems."""

import json
import os

import verifiers.v1 as vf

from tepo_megatron import Problem

CONFIG = vf.resolve_env_config({"taskset": {"id": "gsm8k_v1"}, "agent": {"runtime": {"type": "subprocess"}}})
TASKS = list(vf.load_environment(CONFIG).taskset.take(10_000))


async def solve(problem: Problem, base_url: str, api_key: str) -> float:
    environment = vf.load_environment(CONFIG)  # it serves one event loop, and each episode has its own
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=api_key)
    os.environ[api_key] = api_key  # verifiers reads keys from there
    try:
        async with environment.serving():
            episode = await environment.run_episode(TASKS[problem.metadata["row"]], vf.ModelContext("policy", client))
    finally:
        del os.environ[api_key]
    if not episode.ok:
        raise RuntimeError(str([*episode.errors, *(error for trace in episode.traces for error in trace.errors)]))
    return sum(trace.reward for trace in episode.traces)


if __name__ == "__main__":
    for row, task in enumerate(TASKS):
        print(json.dumps({"prompt": task.data.prompt_text, "answer": "-", "row": row}))
