"""The base class of every section of a run's configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; refuses unknown keys. The string below a field is its meaning, which ``tepo config schema`` shows."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)
