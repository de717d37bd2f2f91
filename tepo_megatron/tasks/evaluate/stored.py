"""Responses as they come, on a disk, so that an evaluation that was ended goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tepo_megatron.core.types import Response, WeightsVersion
from tepo_megatron.tasks.evaluate.answers import Sampler

_NO_WEIGHTS = WeightsVersion(0)


class StoredResponses:
    """A sampler that writes every prompt's responses to a file as soon as they are complete, and draws only those that the file
    lacks. What is drawn is the same in any case: a prompt's seed is made of its place.

    ``of`` is what the responses depend on beside what each call says, such as the model: others in the file are not taken.
    Log-probs are not kept.
    """

    def __init__(self, path: Path, generate: Sampler, of: str) -> None:
        """Raises ValueError with the line of a file that is damaged in its middle; a last line that was cut off is dropped."""
        self._path, self._generate, self._of = path, generate, of
        self._known = _read(path)
        self.taken = 0
        """Prompts of which responses were taken from the file."""

    def __call__(
        self, prompts: list[tuple[int, ...]], *, n: int, temperature: float, max_new_tokens: int, seed: int, **truncation: Any
    ) -> list[list[Response]]:
        settings = [self._of, n, temperature, max_new_tokens, seed, sorted(truncation.items())]
        keys = [_key(settings, place, prompt) for place, prompt in enumerate(prompts)]
        missing = [place for place, key in enumerate(keys) if key not in self._known]
        self.taken += len(prompts) - len(missing)
        if missing:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:

                def keep(at: int, responses: list[Response]) -> None:
                    key = keys[missing[at]]
                    kept = [[each.response_ids.tolist(), each.finish_reason] for each in responses]
                    file.write(json.dumps({"key": key, "responses": kept}) + "\n")
                    file.flush()
                    self._known[key] = kept

                self._generate(
                    [prompts[place] for place in missing],
                    n=n,
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                    numbers=missing,
                    on_group=keep,
                    **truncation,
                )
        return [[_response(*each) for each in self._known[key]] for key in keys]


def model_identity(folder: Path) -> str:
    """Of the weights in a folder, without reading them: names, sizes and times of its files."""
    parts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()) if path.is_file()]
    return sha256(repr(parts).encode()).hexdigest()


def _key(settings: Sequence[Any], place: int, prompt: tuple[int, ...]) -> str:
    return sha256(repr((settings, place, prompt)).encode()).hexdigest()[:32]


def _response(ids: list[int], finish_reason: str) -> Response:
    return Response(ids, [0.0] * len(ids), "length" if finish_reason == "length" else "stop", _NO_WEIGHTS)


def _read(path: Path) -> dict[str, list[list[Any]]]:
    if not path.is_file():
        return {}
    found: dict[str, list[list[Any]]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            found[row["key"]] = [[list(ids), str(reason)] for ids, reason in row["responses"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no responses: {error!r}; remove the file, or leave --resume out") from error
    if lines[-1]:
        path.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
    return found
