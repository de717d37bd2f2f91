"""The base classes of the sections of a run's configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; refuses unknown keys. The string below a field is its meaning, which ``tepo config schema`` shows."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class FiniteSection(Section):
    """A section that takes no infinite number: a bound at infinity bounds nothing, and would say so nowhere."""

    model_config = ConfigDict(allow_inf_nan=False)
