"""Damaged configurations are accepted where they are valid after all, or refused in sentences: no traceback, little memory."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.config.base import Section
from tepo_megatron.config.load import ConfigError, dump_resolved, load_run
from tepo_megatron.tools.faults.input_faults import malformed_configs

NEVER_VALID = {"a tag", "deep lists", "not UTF-8", "too large"}


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**63), number=st.integers(0, 50))
def test_each_is_valid_or_refused_in_sentences(seed: int, number: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One that is accepted is written and read back as the same run."""
    (damaged,) = islice(malformed_configs(number + 1, seed), number, None)
    path = tmp_path_factory.mktemp("malformed") / "run.yaml"
    path.write_bytes(damaged.text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = load_run(path, damaged.overrides)
        except ConfigError as error:
            problems = error.problems
        else:
            problems = ("accepted",) if damaged.kind not in NEVER_VALID else ()
            path.write_text(dump_resolved(config), encoding="utf-8")
            assert load_run(path).model_dump() == config.model_dump()
    assert problems, damaged.kind
    assert all(problem and problem.isprintable() and len(problem) < 1500 for problem in problems)


def test_the_same_seed_gives_the_same_configurations() -> None:
    assert list(malformed_configs(90, 7)) == list(malformed_configs(90, 7)) != list(malformed_configs(90, 8))


@pytest.mark.parametrize("override", ["output=/dev/shm/run", "seed=2147483647", "objective.kl_mask={}", "output=out/${name}"])
def test_what_can_be_meant_is_accepted(override: str) -> None:
    load_run(None, [override])


def test_an_environment_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret of the environment would be in resolved.yaml."""
    monkeypatch.setenv("TOKEN", "secret")
    path = tmp_path / "run.yaml"
    for text in ("name: ${oc.env:TOKEN}\n", "base: ${oc.env:TOKEN}\n", "data: {train: 'a/${ oc.env : TOKEN }'}\n"):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_run(path)
        assert "secret" not in str(caught.value)
    path.write_text("name: \\${oc.env:TOKEN}\n")  # text, as dump_resolved writes it
    assert load_run(path).name == "${oc.env:TOKEN}"
    path.write_text(dump_resolved(load_run(path)))
    assert load_run(path).name == "${oc.env:TOKEN}"


def test_no_section_takes_an_infinite_number() -> None:
    def sections(of: type[Section]) -> list[type[Section]]:
        return [of, *(inner for each in of.__subclasses__() for inner in sections(each))]

    assert len(sections(Section)) > 40
    assert [each.__name__ for each in sections(Section) if each.model_config.get("allow_inf_nan") is not False] == []
