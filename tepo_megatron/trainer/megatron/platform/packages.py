"""Finds which optional GPU packages are installed, and so whose fused kernels Megatron-Core will use.

Reads metadata and files, and imports none of the packages; ``tepo doctor`` uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tepo_megatron.versions import TE_RANGE, installed_version

INSTALL_TE = f"pip install --no-build-isolation 'transformer-engine[pytorch]{TE_RANGE}'"
WGRAD = "fused_weight_gradient_mlp_cuda"
"""The extension of NVIDIA's apex that adds a weight's gradient to Megatron's buffer inside the matrix product."""


@dataclass(frozen=True)
class Packages:
    """``te``: version of Transformer Engine, or None. ``apex``, ``wgrad``: whether NVIDIA's apex and its extension exist."""

    te: str | None = None
    apex: bool = False
    wgrad: bool = False


NO_PACKAGES = Packages()


def installed_packages() -> Packages:
    """Returns the packages installed here. Nothing is imported: a package that cannot be loaded counts as installed."""
    te = installed_version("transformer-engine")
    return Packages(te=te, apex=is_nvidia_apex(package_folder("apex")), wgrad=find_spec(WGRAD) is not None)


def package_folder(name: str) -> Path | None:
    """Returns the folder of a top-level package without importing it, or None."""
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def is_nvidia_apex(folder: Path | None) -> bool:
    """Whether this folder of a package named apex is NVIDIA's: the project of that name on PyPI has no fused optimizers."""
    return folder is not None and (folder / "optimizers").is_dir() and (folder / "multi_tensor_apply").is_dir()


def adam_kernel(packages: Packages) -> tuple[str, str]:
    """Returns (whose Adam Megatron-Core takes, why): it tries Transformer Engine's, then apex', then torch's."""
    if packages.te is not None:
        return "Transformer Engine's", "it is installed"
    if packages.apex:
        return "apex'", "there is no Transformer Engine, and NVIDIA's apex is installed"
    return "torch's", "there is neither Transformer Engine nor NVIDIA's apex"


def norm_kernel(layers: str) -> tuple[str, str]:
    """Returns (whose RMSNorm the layers have, why); ``layers`` is ``te`` or ``local``. Megatron-Core takes none of apex."""
    if layers == "te":
        return "Transformer Engine's, fused into the linear that follows", "the layers are Transformer Engine's"
    return "torch's", "the layers are Megatron-Core's own, whose fused norm (apex') is no RMSNorm"
