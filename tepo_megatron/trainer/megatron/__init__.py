"""The trainer on Megatron-Core; only it and benchmarks import megatron.core."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tepo_megatron.config import RunConfig
    from tepo_megatron.runtime.heartbeat import Heartbeat
    from tepo_megatron.trainer.protocol import Trainer


class _TransformerEngine(MetaPathFinder):
    """Tries Transformer Engine before Megatron-Core's first import, and hides it if it is broken.

    Megatron-Core imports it wherever it is installed and survives an ImportError only. A missing or foreign torch part raises
    FileNotFoundError or OSError, which would end every run, those with ``engine.layers=local`` too.
    """

    problem: str | None = None
    """Why the Transformer Engine that is installed is not used."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "megatron.core":
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]  # importlib iterates over the old list
            self._try()

    def _try(self) -> None:
        if importlib.util.find_spec("transformer_engine") is None:
            return
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as error:  # whatever a wrong build raises
            self.problem = f"{type(error).__name__}: {error}"
            for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
                del sys.modules[name]
            sys.modules["transformer_engine"] = None  # type: ignore[assignment] # its imports raise ModuleNotFoundError


TRANSFORMER_ENGINE = _TransformerEngine()
sys.meta_path.insert(0, TRANSFORMER_ENGINE)

from tepo_megatron.trainer.megatron.gpu import check_config as check_config  # noqa: E402  # reads TRANSFORMER_ENGINE
from tepo_megatron.trainer.megatron.gpu import prepare_process as prepare_process  # noqa: E402


def make_trainer(config: RunConfig, model_dir: Path, *, shares_gpus: bool, heartbeat: Heartbeat) -> Trainer:
    from tepo_megatron.trainer.megatron.engine import Engine

    return Engine(config, model_dir, shares_gpus=shares_gpus, heartbeat=heartbeat)
