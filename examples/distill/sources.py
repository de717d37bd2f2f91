"""Generation steps without a reward, for ``rollout.collect``: with equal rewards only the teacher's divergence is left.

Responses are the student's own, or the teacher's, which is off-policy distillation.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.sampling.custom_rollout import StepSampler
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer

TEACHER = Path(__file__).parent / "teacher"
MAX_NEW_TOKENS = 32


def of_the_student(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
    return [dataclasses.replace(rollout, reward=0.0) for group in sampler.sample(problems) for rollout in group]


def of_the_teacher(problems: Sequence[Problem], sampler: StepSampler) -> list[Rollout]:
    """What the student drew, once per problem, names the prompt and the present weights; its tokens are replaced."""
    drafts = [group[0] for group in sampler.sample(problems, n=1)]
    responses = _sample([draft.prompt_ids.tolist() for draft in drafts], sampler.samples, seed=sampler.step)
    decode = _teacher()[1].decode
    return [
        dataclasses.replace(
            draft,
            response_ids=np.array(ids, np.int32),
            sampler_logprobs=np.array(logprobs, np.float32),
            text=decode(ids),
            finish_reason="stop" if len(ids) < MAX_NEW_TOKENS else "length",
            reward=0.0,
        )
        for draft, samples in zip(drafts, responses, strict=True)
        for ids, logprobs in samples
    ]


@functools.cache
def _teacher() -> tuple[Any, Tokenizer]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval(), load_tokenizer(TEACHER)


@torch.no_grad()
def _sample(prompts: Sequence[Sequence[int]], count: int, seed: int) -> list[list[tuple[list[int], list[float]]]]:
    """Returns ``count`` responses per prompt at temperature 1, each as token ids and log-probs. Prompts have one length."""
    model, tokenizer = _teacher()
    eos = tokenizer.eos_ids[0]
    tokens, generator, cache = torch.tensor(prompts).repeat_interleave(count, 0), torch.Generator().manual_seed(seed), None
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(MAX_NEW_TOKENS):
        output = model(tokens, past_key_values=cache)
        logp, cache = output.logits[:, -1].log_softmax(-1), output.past_key_values
        tokens = torch.multinomial(logp.exp(), 1, generator=generator)
        drawn.append((tokens, logp.gather(1, tokens)))
    ids, logprobs = (torch.cat(values, 1) for values in zip(*drawn, strict=True))
    rows = []
    for row, values in zip(ids.tolist(), logprobs.tolist(), strict=True):
        length = row.index(eos) + 1 if eos in row else len(row)
        rows.append((row[:length], values[:length]))
    return [rows[index : index + count] for index in range(0, len(rows), count)]
