"""The bases of sections: frozen, unknown keys are errors, every field says what it is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class FiniteSection(Section):
    """A section that takes no infinite number: a bound at infinity bounds nothing, and would say so nowhere."""

    model_config = ConfigDict(allow_inf_nan=False)
