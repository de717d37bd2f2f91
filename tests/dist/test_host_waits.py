"""The host waits for the device a fixed number of times a run of micro-batches, not at every micro-batch."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Split, Worlds, bits_of, make_engine, states_of
from tests.support.host_waits import HostWaits
from tests.support.random_models import VOCABULARY, draw_rollouts, write_llama

SPLITS = [Split(), Split(tp=2), Split(cp=2)]
ON_A_CPU = {"attention_cpu.py"}
"""Transformer Engine is in its place on a GPU."""


def work(split: Split, folder: Path) -> dict[str, Any]:
    engine = make_engine(
        {
            "model": {"path": str(folder / "model")},
            "engine": {"parallel": split.parallel},
            "optimizer": {"lr": 1e-3},
            "train": {"minibatches": 1, "steps": 10},
        }
    )
    batch = engine.batch_from_root(draw_rollouts([9, 11] * 12) if engine.ranks.rank == 0 else None)
    batch = batch.with_(recorded_S=torch.where(torch.arange(24) < 3, torch.arange(24), -1))
    counts, waits = [], []
    for tokens in (120, 20):
        limited = engine.config.engine.model_copy(update={"micro_batch_tokens": tokens})
        engine.forward = replace(engine.forward, engine=limited)
        counts.append(len(engine.forward.micro_batches(batch)))
        with HostWaits() as seen:
            assert not engine.update(engine.score(batch)).skipped
        waits.append(seen.places)
    before, errors = bits_of({**states_of(engine), **engine.policy.params}), []
    for place, label in ((3, VOCABULARY), (-3, -7)) if split.cp == 1 else ():
        wrong_T = batch.labels_T.clone()
        wrong_T[batch.loss_mask_T.nonzero()[place]] = label
        scored = engine.score(batch).with_(labels_T=wrong_T)
        with pytest.raises(ValueError, match="micro-batch") as caught:
            engine.update(scored)
        errors.append(str(caught.value))
        assert bits_of({**states_of(engine), **engine.policy.params}) == before
    return {"counts": counts, "waits": waits, "errors": errors}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds[Split]:
    folder = tmp_path_factory.mktemp("host_waits")
    write_llama(folder / "model", num_hidden_layers=2)
    return Worlds(folder, SPLITS, work)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_more_micro_batches_cost_no_more_waits(worlds: Worlds[Split], split: Split) -> None:
    for report in worlds.ranks(split):
        few, many = report["counts"]
        assert many > few + 5
        more = Counter(report["waits"][1])
        more.subtract(report["waits"][0])
        growing = [f"{place}: {more[place]}" for place in more if more[place] and place.split(":")[0] not in ON_A_CPU]
        assert not growing, f"for {many - few} more micro-batches\n" + "\n".join(growing)


@pytest.mark.parametrize("split", SPLITS[:2], ids=lambda split: split.name)
def test_a_wrong_label_is_named_on_every_rank_before_weights_change(worlds: Worlds[Split], split: Split) -> None:
    first, *others = [report["errors"] for report in worlds.ranks(split)]
    assert all(errors == first for errors in others)
    for error, label in zip(first, (VOCABULARY, -7), strict=True):
        assert re.match(rf"micro-batch \d+: the label of token \d+ is {label}, outside \[0, {VOCABULARY}\); leave", error)
