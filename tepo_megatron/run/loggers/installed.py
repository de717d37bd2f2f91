"""Which loggers a run switches on, and whether their packages are here. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tepo_megatron.config import LogConfig

TITLES = {"wandb": "W&B", "mlflow": "MLflow"}
"""The kinds of loggers, by the name of their section and of their package."""


def sections(config: LogConfig) -> dict[str, Any]:
    """The sections of the loggers that are switched on, as JSON has them."""
    given = {"wandb": config.wandb, "mlflow": config.mlflow}
    return {kind: section.model_dump(mode="json") for kind, section in given.items() if section is not None}


def check_installed(config: LogConfig) -> None:
    """Raises ValueError, a sentence, where a logger is switched on whose package is not installed. Imports none of them."""
    for kind in sections(config):
        missing = [name for name in _needed(kind, config) if not _is_installed(name)]
        if missing:
            raise ValueError(
                f"log.{kind} is given, but the package {' and '.join(missing)} is not installed here: "
                f"pip install 'tepo-megatron[{kind}]', or leave log.{kind} out"
            )


def _needed(kind: str, config: LogConfig) -> tuple[str, ...]:
    uri = config.mlflow.tracking_uri if config.mlflow is not None else None
    return ("mlflow", "sqlalchemy") if kind == "mlflow" and (uri or "sqlite").startswith("sqlite") else (kind,)


def _is_installed(name: str) -> bool:
    """A folder of that name, such as the ``wandb`` that W&B makes in the current folder, is no package."""
    found = find_spec(name)
    return found is not None and found.origin is not None
