"""The schema has every field, with what it takes and what it means."""

from pydantic import BaseModel

from tepo_megatron.config import RunConfig
from tepo_megatron.config.schema import json_schema, schema_rows


def leaves(model: BaseModel, prefix: str = "") -> set[str]:
    """Every dotted path of a configuration, found by walking its values."""
    found = set()
    for name in type(model).model_fields:
        value = getattr(model, name)
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name}
    return found


def test_every_field_of_a_run_has_a_row_with_its_default() -> None:
    rows = {row.path: row for row in schema_rows()}
    tags = {path for path in leaves(RunConfig()) if path.rpartition(".")[2] == "kind" and path not in rows}
    assert leaves(RunConfig()) - tags <= set(rows)
    assert all(path.rpartition(".")[0] in rows for path in tags)
    assert (rows["optimizer.lr"].default, rows["optimizer.lr"].allowed) == ("1e-06", "a number > 0")
    assert rows["engine.parallel.tp"].description.startswith("Tensor-parallel size")


def test_every_row_has_a_meaning() -> None:
    """A string literal below the field."""
    assert [row.path for row in schema_rows() if not row.description.strip()] == []


def test_a_variant_has_its_own_rows() -> None:
    whens = {row.when for row in schema_rows() if row.path == "objective.trust_region.low"}
    assert {'kind = "clip"', 'kind = "clip_weight"'} <= whens


def test_the_json_schema_closes_every_section() -> None:
    sections = [json_schema(), *(section for section in json_schema()["$defs"].values() if "properties" in section)]
    assert len(sections) > 10
    assert all(section["additionalProperties"] is False for section in sections)
