"""An agent of one's own: it plays "guess the number" with a model that it knows by an address and a key alone.

Nothing in it is of this package but the problem that it is given; the client is OpenAI's own.
"""

import re
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from tepo_megatron import Problem

HTTP = DefaultHttpxClient()
"""One for all episodes: a client of its own takes as long to make as many requests."""


def solve(problem: Problem, base_url: str, api_key: str, turns: int = 3) -> float:
    """1 where the model finds the number in so many turns. A guess is answered ``<`` where the number is smaller."""
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    for _ in range(turns):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        found = re.search(r"\d+", answer.content or "")
        if found is None:
            hint = "?"
        elif found[0] == problem.answer:
            return 1.0
        else:
            hint = "<" if int(problem.answer) < int(found[0]) else ">"
        messages += [answer, {"role": "user", "content": hint}]
    return 0.0
