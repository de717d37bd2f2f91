"""The trainer on Megatron-Core; only it and benchmarks import megatron.core."""

from __future__ import annotations

import importlib
import importlib.util
import sys


def _broken_transformer_engine() -> str | None:
    """Returns why an installed Transformer Engine cannot be imported, and makes Megatron-Core go without it.

    Megatron-Core imports it wherever it is installed and survives an ImportError only; a missing or foreign torch part raises
    FileNotFoundError or OSError, which would end every run, those with ``engine.layers=local`` too.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # whatever a wrong build raises
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment] # imports of it raise ModuleNotFoundError
        return f"{type(error).__name__}: {error}"
    return None


TE_PROBLEM = _broken_transformer_engine()
"""Why the Transformer Engine that is installed is not used, or None."""
