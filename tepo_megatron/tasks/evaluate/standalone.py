"""Evaluates a model folder without a trainer (``tepo eval``)."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from tepo_megatron.config import EngineConfig, RunConfig
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.core.problem import Problem
from tepo_megatron.core.rollout import Response, WeightsVersion
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.machine import this_machine
from tepo_megatron.runtime.run_lock import RunLock
from tepo_megatron.runtime.terminal import Terminal
from tepo_megatron.runtime.text import echo, parse_json
from tepo_megatron.sampler.protocol import make_sampler, sampler_spec
from tepo_megatron.sampler.sampling import truncation_of
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.sources import Source
from tepo_megatron.tasks.data.tokenizer import Tokenizer, load_tokenizer
from tepo_megatron.tasks.environments.environment_task import open_task
from tepo_megatron.tasks.evaluate.estimators import Interval
from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult, EvaluationSet, SetResult, evaluate_all, verifier_pools
from tepo_megatron.tasks.evaluate.results import NUMERICS, RESULTS, model_state, write_results
from tepo_megatron.tasks.protocol import Generate
from tepo_megatron.tasks.reward.verifiers import GIVEN
from tepo_megatron.weights.architecture import read_model_spec


def evaluate_model(
    config: RunConfig,
    model: Path | str,
    *,
    table: bool = True,
    sets: Sequence[str] | None = None,
    resume: bool = False,
    reward: Any = None,
) -> EvaluationResult:
    """Evaluates a Hugging Face folder on ``config.data.heldout`` and the sets of ``config.evaluate``. One process calls.

    With sets, the default held-out problems are left out: they belong to the demonstration. ``sets``: only these names.
    ``resume``: reuse responses of an interrupted evaluation of equal model and settings. ``reward``: the function or object
    that ``train`` was given, in place of ``reward.verifier``. ``<output>/eval`` receives ``metrics.json``, ``samples.jsonl``,
    servers' logs, and for each set, and ``data.heldout``, ``results/NAME.jsonl`` (responses) and ``.json`` (figures).

    Raises ValueError for nothing to evaluate, an unusable model, source or verifier, a ``rollout.server.tp`` that cannot split
    the model, external servers without weights or of another one, or a folder in use; RuntimeError if a server does not start.
    """
    config = config.model_copy(update={"engine": EngineConfig(platform="cpu" if config.engine.platform == "cpu" else "auto")})
    config = config.with_dtype(config.dtype(this_machine().gpus))  # of the servers: there is no trainer
    config = config if reward is None else _with_given(config, reward)
    folder = resolve_model_path(str(model))
    spec = read_model_spec(folder)
    sampler_spec().check_model(config.rollout.server.model_copy(update={"transfer": "gather"}), spec)  # vLLM loads the weights
    servers = _without_trainer(config.rollout.server, folder)
    tokenizer = load_tokenizer(folder, config.data.chat_template_kwargs)
    tokenizer.check_model()
    limit = config.rollout.server.max_model_len or spec.max_positions
    heldout, left_out = _heldout(config, tokenizer, sets, limit)
    chosen = EvaluationSet.load_all(config, tokenizer, sets, limit)
    tokenizer.check_sampling(config.rollout.sampling, chain(heldout, *(of.problems for of in chosen)))
    output = config.output / "eval"
    fleet = make_sampler(
        servers,
        model_dir=folder,
        dtype=config.model.dtype,
        stop_token_ids=tokenizer.eos_ids,
        log_dir=output / "logs",
        seed=config.seed,
        tokenizer=config.rollout.sampling.needs_tokenizer,
        with_ranks=True,  # not the servers of a training run that starts this
    )
    state = model_state(folder)  # before the servers read it
    stored = output / "responses.jsonl"
    truncation = truncation_of(config.rollout.sampling)
    served = servers.model_dump(mode="json", include=NUMERICS) | {"dtype": servers.served_dtype(config.model.dtype)}
    progress = _progress()
    answer = partial(fleet.generate, on_progress=progress)
    lock = RunLock(output)
    with ExitStack() as stack:
        lock.take()
        stack.callback(lock.release)
        generate = partial(StoredResponses(stored, answer, state, served, resume=resume), **truncation)
        num_problems = len(heldout[: config.evaluate.problems]) + sum(len(of.problems) for of in chosen)
        echo(f"evaluates {model} on {num_problems} problems; starts the servers (their logs: {output / 'logs'})", err=True)
        with open_task(config, tokenizer, spec, reward) as task, verifier_pools(config, chosen, task, heldout) as pools, fleet:
            result = evaluate_all(
                config,
                heldout,
                chosen,
                generate=generate,
                generate_heldout=task.heldout_generate(generate, fleet, heldout, on_progress=progress, **truncation),
                tokenizer=tokenizer,
                pools=pools,
                seed=lambda _purpose: config.seed,
            )
        _write(output, result)
        results = result.sets if result.heldout is None else (*result.sets, result.heldout)
        about: dict[str, Any] = {"model": model, "state": state, "seed": config.seed, "served": served}
        written = [write_results(output / RESULTS, item, **about) for item in results]
        stored.unlink(missing_ok=True)  # the results have them
    if table:
        console = Terminal.of_output()
        if heldout:
            console.print(_table(model, ", ".join(source.path for source in config.data.heldout_sources), result, left_out))
        if chosen:
            console.print(_sets_table(model, result.sets, written[: len(result.sets)]))
    return result


def _with_given(config: RunConfig, reward: Any) -> RunConfig:
    if config.reward.verifier.startswith(GIVEN):
        return config
    name = getattr(reward, "__name__", type(reward).__name__).strip("<>")
    return config.model_copy(update={"reward": config.reward.model_copy(update={"verifier": f"{GIVEN}{name}"})})


_PROGRESS_S = 10.0


def _progress() -> Callable[[int, int], None]:
    """Says (prompts answered, all) on standard error, now and then."""
    last_line = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= _PROGRESS_S:
            last_line = time.monotonic()
            echo(f"answered {done} of {total} prompts", err=True)

    return say


def _heldout(config: RunConfig, tokenizer: Tokenizer, sets: Sequence[str] | None, limit: float) -> tuple[list[Problem], int]:
    default = config.data.heldout is None or "heldout" not in config.data.model_fields_set
    if sets or (config.evaluate.sets and default):
        return [], 0
    if config.data.heldout is None:
        raise ValueError("data.heldout is not given: there are no problems to evaluate on; give data.heldout = FILE")
    sources = Source.read_all(config.data, "heldout", tokenizer)
    config.rollout.check_room([size for source in sources for size in source.sizes][: config.evaluate.problems], limit)
    return [problem for source in sources for problem in source.used], sum(source.left_out.total() for source in sources)


def _without_trainer(server: ServerConfig, model: Path) -> ServerConfig:
    """Colocated servers become local and read the model's weights. Raises ValueError for servers without weights."""
    if server.placement != "external":
        return server.model_copy(update={"placement": "local", "load_format": "auto"})
    if server.starts_with_dummies(trained=True):
        raise ValueError(
            "rollout.server.placement = external, but servers of 'tepo serve' start without weights and wait for a trainer's; "
            f"set rollout.server.load_format = model, there and here, and serve this model there (model.path = {model})"
        )
    return server


def _write(output: Path, result: EvaluationResult) -> None:
    figures: dict[str, float] = dict(result.metrics)
    if result.num_problems:
        figures |= {"k": result.k, "problems": result.num_problems, "response_len/mean": result.mean_response_len}
    write_atomically(output / "metrics.json", json.dumps(figures, indent=2) + "\n")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result.samples)
    write_atomically(output / "samples.jsonl", rows)


def _table(model: Path | str, source: str, result: EvaluationResult, left_out: int) -> Table:
    table = Table("", "value", title=escape(f"{model} on {source}"), title_justify="left")
    for name, value in result.metrics.items():
        if not name.startswith("eval/"):
            table.add_row(name, f"{value:.3f}")
    table.add_row("response length, mean", f"{result.mean_response_len:.1f} tokens")
    table.add_row("problems", f"{result.num_problems}" + (f" ({left_out} left out, too long)" if left_out else ""))
    if result.failures:
        table.add_row(
            "responses that could not be scored", f"{result.failures}; the first: {escape(str(result.first_failure))}"
        )
    return table


def _sets_table(model: Path | str, results: Sequence[SetResult], intervals: Sequence[Mapping[str, Interval]]) -> Table:
    table = Table("set", "", "value", "95 %", title=escape(f"{model} on {len(results)} sets"), title_justify="left")
    for result, figures in zip(results, intervals, strict=True):
        left_out = f" ({result.of.left_out} left out, too long)" if result.of.left_out else ""
        table.add_row(result.of.name, "problems", f"{len(result.problems)}{left_out}")
        for name, value in figures.items():
            digits, unit = (".1f", " tokens") if name == "response_len" else (".3f", "")
            table.add_row("", name, f"{value.mean:{digits}}{unit}", f"{value.low:{digits}} to {value.high:{digits}}")
        if errors := result.errors:
            table.add_row("", "could not be scored", f"{len(errors)}; the first: {escape(errors[0])}")
        table.add_section()
    return table


class StoredResponses:
    """Draws only responses that the file lacks, with seeds by the prompt's index: the result is the same. Responses of
    another ``model_state`` or other settings do not count. Log-probs are not stored.
    """

    def __init__(self, path: Path, generate: Generate, model: str, served: Mapping[str, Any], *, resume: bool = True) -> None:
        """Drops an incomplete last line. Raises ValueError for other damage. Without ``resume`` the first call empties it."""
        self._path, self._generate, self._resume = path, generate, resume
        self._model = repr((model, sorted(served.items())))
        self._known = _read(path) if resume else {}
        self._mode = "a" if resume else "w"
        if not resume and path.is_file() and (count := path.read_bytes().count(b"\n")):
            echo(
                f"{path} has answers of an interrupted evaluation ({count} prompts), which are removed when the servers have "
                "started; if they are of this model and these settings, end this (Ctrl-C) and give --resume",
                err=True,
            )

    def __call__(self, prompts: list[tuple[int, ...]], **settings: Any) -> list[list[Response]]:
        about = (self._model, sorted(settings.items()))
        keys = [sha256(repr((about, index, prompt)).encode()).hexdigest()[:32] for index, prompt in enumerate(prompts)]
        missing = [index for index, key in enumerate(keys) if key not in self._known]
        if self._resume:
            echo(f"{len(prompts) - len(missing)} of {len(prompts)} prompts are taken from {self._path}", err=True)
        if missing:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(self._mode, encoding="utf-8") as file:
                self._mode = "a"

                def keep(index: int, responses: list[Response]) -> None:
                    key = keys[missing[index]]
                    retained = [[response.response_ids.tolist(), response.finish_reason] for response in responses]
                    file.write(json.dumps({"key": key, "responses": retained}) + "\n")
                    file.flush()
                    self._known[key] = retained

                self._generate([prompts[index] for index in missing], numbers=missing, on_group=keep, **settings)
        return [[_response(*item) for item in self._known[key]] for key in keys]


def _response(ids: list[int], finish_reason: str) -> Response:
    return Response(ids, [0.0] * len(ids), "length" if finish_reason == "length" else "stop", WeightsVersion(0))


def _read(path: Path) -> dict[str, list[list[Any]]]:
    if not path.is_file():
        return {}
    results: dict[str, list[list[Any]]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = parse_json(line, "the line")
            results[row["key"]] = [[list(ids), str(reason)] for ids, reason in row["responses"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no responses: {error!r}; remove the file, or leave --resume out") from error
    if lines[-1]:
        os.truncate(path, path.stat().st_size - len(lines[-1]))  # needs no room on the disk
    return results
