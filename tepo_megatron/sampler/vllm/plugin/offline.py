"""Runs vLLM's offline engine, for ``tepo bench rollouts``.

Lines of JSON: the engine's arguments, answered by ``{}``; then requests ``{"prompts": [[ids]], "n": 8, "seeds": [7],
"temperature": 1.0, "max_tokens": 32}``, answered by ``{"seconds", "tokens", "sha256"}``.
"""

import json
import os
import sys
import time
from hashlib import sha256
from typing import Any, TextIO

import numpy as np


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard error
    lines = iter(sys.stdin)
    from vllm import LLM

    llm = LLM(**json.loads(next(lines)))
    _say(answers, {})
    for line in lines:
        _say(answers, _draw(llm, json.loads(line)))


def _draw(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    settings = {"n": order["n"], "temperature": order["temperature"], "max_tokens": order["max_tokens"]}
    parameters = [
        SamplingParams(**settings, seed=seed, logprobs=0, flat_logprobs=True, detokenize=False) for seed in order["seeds"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - begin
    digest, tokens = sha256(), 0
    for drawn in (each for output in outputs for each in output.outputs):
        digest.update(np.asarray(drawn.token_ids, np.int32).tobytes())
        tokens += len(drawn.token_ids)
    return {"seconds": seconds, "tokens": tokens, "sha256": digest.hexdigest()}


def _say(answers: TextIO, content: dict[str, Any]) -> None:
    print(json.dumps(content), file=answers, flush=True)


if __name__ == "__main__":
    main()
