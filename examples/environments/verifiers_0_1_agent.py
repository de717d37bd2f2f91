"""An environment of `verifiers` (0.1) as an agent. `python verifiers_0_1_agent.py > problems.jsonl` writes its problems."""

import json

import verifiers as vf
from openai import AsyncOpenAI

from tepo_megatron import Problem

ENVIRONMENT = vf.load_environment("gsm8k")  # here, as it sets signal handlers, which agents' threads may not
ROWS = ENVIRONMENT.get_dataset()


async def solve(problem: Problem, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        client = vf.OpenAIChatCompletionsClient(openai)
        rollout = await ENVIRONMENT.run_rollout(ROWS[problem.metadata["row"]], client, "policy", {})
    if rollout["error"]:
        raise RuntimeError(str(rollout["error"]))
    return float(rollout["reward"])


if __name__ == "__main__":
    for row, item in enumerate(ROWS):
        print(json.dumps({"prompt": item["prompt"][-1]["content"], "answer": item["answer"], "row": row}))
