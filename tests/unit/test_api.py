"""What imports offer, and what they do: these names, lazily, with docstrings and pages, and nothing else."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import tepo_megatron
from tests.support.programs import run_python

ROOT = Path(__file__).parents[2]
WITH_TORCH = {
    *("Batch", "EvaluationResult", "Objective", "ObjectiveOutput", "StepContext", "StepSampler", "StepValues", "Surrogate"),
    *("TokenScores", "TokenValues", "build_objective", "check_objective", "evaluate_model", "export_model"),
    *("fused_linear_logprob_and_entropy", "import_model", "logprob_and_entropy", "train_model"),
}


def test_names_are_listed_once_and_not_those_of_files() -> None:
    """Importing a submodule sets an attribute of its name, which would replace the function."""
    names = tepo_megatron.__all__
    assert len(names) == len(set(names))
    assert set(names) > WITH_TORCH
    assert set(names) <= set(dir(tepo_megatron))
    assert not {module.name for module in pkgutil.iter_modules(tepo_megatron.__path__)} & set(names)


def test_every_name_is_there_and_says_what_it_is() -> None:
    for name in set(tepo_megatron.__all__) - {"__version__"}:
        value = getattr(tepo_megatron, name)
        assert value.__name__ == name
        assert value.__module__.startswith("tepo_megatron."), name
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}("), "what dataclasses writes where there is none"


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rollout_'"):
        tepo_megatron.__getattr__("rollout_")


def test_type_checkers_see_the_same_homes() -> None:
    tree = ast.parse((ROOT / "tepo_megatron/__init__.py").read_text())
    imported = {
        alias.name: str(node.module).removeprefix("tepo_megatron.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tepo_megatron.")
        for alias in node.names
    }
    assert imported == tepo_megatron._HOMES


def test_importing_the_package_imports_nothing_else_and_a_login_node_needs_no_torch() -> None:
    run_python(
        "-c",
        "import sys; before = set(sys.modules)\n"
        "import tepo_megatron\n"
        "new = set(sys.modules) - before\n"
        "assert {name for name in new if name.split('.')[0] not in sys.stdlib_module_names} == {'tepo_megatron'}, new\n"
        f"for name in {sorted(set(tepo_megatron.__all__) - WITH_TORCH)}: getattr(tepo_megatron, name)\n"
        "tepo_megatron.make_plan(tepo_megatron.load_run('examples/llama3.3-70b/run.yaml'))\n"
        "assert not {'torch', 'transformers', 'megatron', 'vllm'} & set(sys.modules)",
        cwd=ROOT,
    )


def test_every_name_has_its_place_in_the_pages() -> None:
    """A name that goes, or another one, is a new version: docs/reference/versions.md."""
    pages = {path.name: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    shown = [name for text in pages.values() for name in re.findall(r"^::: tepo_megatron\.(\w+)$", text, flags=re.MULTILINE)]
    assert sorted([*shown, "__version__"]) == sorted(tepo_megatron.__all__)
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| \[.*$", pages["index.md"], flags=re.MULTILINE)))
    assert sorted([*listed, "__version__"]) == sorted(tepo_megatron.__all__)


SCRIPT = """
import importlib.util, os, pkgutil, sys, warnings
warnings.filterwarnings("ignore")
import torch, torch.distributed, megatron.core

watched = [torch.cuda, torch.Tensor, torch.distributed]
before = [dict(vars(owner)) for owner in watched]
environment = dict(os.environ)

ours = os.path.dirname(importlib.util.find_spec("tepo_megatron").origin) + os.sep
ways_to_it = (os.__file__, "<frozen os>", "<frozen _collections_abc>", "/_collections_abc.py", "/triton/knobs.py")
reads = []

def note(name):
    # Who asks: the first frame that is not one of the ways to the environment. What a library reads for itself is its own.
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith(ways_to_it):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(ours):
        reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno} reads {name}")

class Watched(type(os.environ)):
    def __getitem__(self, name):
        note(name)
        return super().__getitem__(name)

    def __iter__(self):
        note("all of it")
        return super().__iter__()

os.environ.__class__ = Watched
try:
    import triton.knobs
except ModuleNotFoundError:
    pass  # then the modules that need it are not importable either
else:
    for function in ("getenv", "getenv_bool"):  # Triton asks the C library
        def watch(name, *default, of=getattr(triton.knobs, function)):
            note(name)
            return of(name, *default)
        setattr(triton.knobs, function, watch)

import tepo_megatron
for module in pkgutil.walk_packages(tepo_megatron.__path__, "tepo_megatron."):
    of_other_environments = ("tepo_megatron.sampler.vllm.plugin.", "tepo_megatron.launch.slurm_logs")
    if not module.name.startswith(of_other_environments) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for owner, names in zip(watched, before):
    changed = [name for name, value in vars(owner).items() if name in names and names[name] is not value]
    assert not changed, (owner, changed)
assert not torch.distributed.is_initialized()
assert not reads, reads
assert {k: v for k, v in os.environ.items() if environment.get(k) != v} == {}
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing() -> None:
    run_python("-c", SCRIPT)
