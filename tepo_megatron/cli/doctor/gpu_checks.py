"""The checks of ``tepo doctor`` for optional GPU packages, and for whose fused kernels a run here will use."""

from __future__ import annotations

from importlib import metadata

from tepo_megatron.cli.doctor.check import Check, has_gpu
from tepo_megatron.trainer.megatron.platform import packages
from tepo_megatron.trainer.megatron.platform.packages import INSTALL_TE
from tepo_megatron.versions import MEGATRON_LINE, TE_RANGE, in_range, installed_version


def transformer_engine() -> Check:
    name, version = "transformer-engine", installed_version("transformer-engine")
    if version is None and has_gpu():
        advice = (
            f"training on GPUs needs it: {INSTALL_TE}, or take docker/trainer.Dockerfile, or set engine.layers=local (slower)"
        )
        return Check(name, "fail", "not installed, but there is a GPU", advice, needed=True)
    if version is None:
        return Check(name, "missing", "", f"GPU only: fused kernels and FP8; megatron-core {MEGATRON_LINE} wants {TE_RANGE}")
    if not in_range(version, TE_RANGE):
        return Check(name, "warn", version, f"megatron-core {MEGATRON_LINE} wants {TE_RANGE}")
    return Check(name, "ok", version, "fused kernels and FP8 on GPU")


def apex() -> Check:
    """Checks that a package named apex is NVIDIA's: the project of that name on PyPI has no fused optimizers."""
    version = installed_version("apex")
    if version is None:
        return Check("apex", "missing", "", "optional on GPU; built from NVIDIA's source, never from PyPI")
    if not packages.is_nvidia_apex(packages.package_folder("apex")):
        summary = str(metadata.metadata("apex").json.get("summary") or "no description")
        advice = "PyPI's apex is another project, which Megatron-Core would import in place of NVIDIA's: pip uninstall apex"
        return Check("apex", "fail", f"{version} without fused optimizers ({summary})", advice, needed=True)
    return Check("apex", "ok", version, "weight gradients added inside matrix products; fused optimizers without TE")


def kernels() -> Check:
    """Says whose Adam and norm a run will use, by what is installed; the engine itself also tries the import."""
    found = packages.installed_packages()
    adam, why_adam = packages.adam_kernel(found)
    norm, why_norm = packages.norm_kernel("te" if found.te is not None and has_gpu() else "local")
    slow = has_gpu() and adam == "torch's"
    return Check("kernels", "warn" if slow else "ok", f"Adam: {adam}; RMSNorm: {norm}", f"{why_adam}; {why_norm}")
