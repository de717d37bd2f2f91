"""The wheel installs and runs outside the checkout, the warm-start model included."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.support.programs import run_python

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel, built from what git would give."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=CHECKOUT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (CHECKOUT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((CHECKOUT / name).read_bytes())
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    (wheel,) = folder.glob("tepo_megatron-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, *arguments: object) -> str:
    return run_python(*arguments, cwd=installed.parent, environment={"PYTHONPATH": str(installed)}).stdout


SCRIPT = """
from transformers import AutoModelForCausalLM
import tepo_megatron
from tepo_megatron.tasks.data.builtin import resolve_model_path

folder = resolve_model_path("builtin:tiny")
print(tepo_megatron.__file__, folder, AutoModelForCausalLM.from_pretrained(folder).num_parameters())
"""


def test_the_installed_package_runs_its_command_and_loads_the_warm_start(installed: Path) -> None:
    assert "minibatches: 4" in run(installed, "-m", "tepo_megatron", "config", "show", CHECKOUT / "examples/tiny/run.yaml")
    package, folder, parameters = run(installed, "-c", SCRIPT).split()[-3:]
    assert package.startswith(str(installed))
    assert folder.startswith(str(installed))
    assert int(parameters) == 607_360


def test_the_plugin_of_vllm_is_announced(installed: Path) -> None:
    (metadata,) = installed.glob("tepo_megatron-*.dist-info")
    entries = (metadata / "entry_points.txt").read_text()
    assert "[vllm.general_plugins]\ntepo_megatron = tepo_megatron.sampler.vllm.plugin:register" in entries
    assert "tepo = tepo_megatron.cli.main:main" in entries
    assert (installed / "tepo_megatron" / "py.typed").exists()
