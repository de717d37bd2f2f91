"""The objective: a preset's name, and what differs from it."""

from tepo_megatron.config.base import Section


class ObjectiveConfig(Section):
    preset: str = "tepo"
