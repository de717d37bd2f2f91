"""What comes from a disk or a network runs no code: ours unpickles and evaluates nothing, but for a list with reasons."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("tepo_megatron", "scripts", "examples", "docs")

MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "pandas", "xmlrpc"),
    *("multiprocessing.connection", "multiprocessing.managers", "torch.package"),
    *("torch.distributed.rpc", "torch.distributed.checkpoint"),
}
"""Modules whose readers run what they read, or whose listeners do."""

CALLS = {
    *("eval", "exec", "compile", "__import__"),  # run a text
    *("load_pickle", "read_pickle", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "Listener", "BaseManager"),  # unpickle
    *("unsafe_load", "full_load", "UnsafeLoader", "FullLoader"),  # make objects of YAML
    "set_sharing_strategy",  # passes tensors by sockets
}
"""Names that must not be called or passed on."""

_PIPES = "arguments and results by pipes between a parent and its children"
_PROGRAMS = "programs that the model wrote, where reward.run_code says so: within limits, without network (runtime/sandbox.py)"

ALLOWED = {
    ("tepo_megatron/sampler/vllm/plugin/patches.py", "pickle"): "reads only what carries a signature under the run's key",
    (
        "tepo_megatron/trainer/megatron/parallel/collectives.py",
        "all_gather_object",
    ): "is exchanged for one that sends JSON, for Megatron",
    ("tepo_megatron/tools/results.py", "torch.multiprocessing"): _PIPES,
    ("tepo_megatron/tools/faults/processes.py", "multiprocessing"): _PIPES,
    ("tepo_megatron/tools/faults/workshop.py", "multiprocessing"): _PIPES,
    ("tepo_megatron/tools/bench/divergences.py", "exec"): "a peer's installed module, as an import would run it",
    ("tepo_megatron/tools/bench/divergences.py", "compile"): "a peer's installed module, as an import would run it",
    ("tepo_megatron/tasks/reward/run_tests.py", "exec"): _PROGRAMS,
    ("tepo_megatron/tasks/reward/run_tests.py", "compile"): _PROGRAMS,
}


def found_in(path: Path, source: str | None = None) -> Iterator[tuple[str, str]]:
    """(file, name) of whatever could run what it reads."""
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(source if source is not None else path.read_text())):
        for module in _imports(node):
            if module.split(".")[0] in MODULES or any(module == each or module.startswith(each + ".") for each in MODULES):
                yield name, module
            if module.startswith(("multiprocessing", "torch.multiprocessing")):
                yield name, ".".join(module.split(".")[: 2 if module.startswith("torch") else 1])
        if isinstance(node, ast.Attribute) and node.attr in CALLS and not _is_harmless(node):
            yield name, node.attr
        if isinstance(node, ast.Name) and node.id in CALLS:
            yield name, node.id
        if isinstance(node, ast.Call):
            yield from ((name, what) for what in _loads(node))


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _is_harmless(node: ast.Attribute) -> bool:
    """``re.compile(pattern)``, ``model.eval()``: methods of that name that take no text to run."""
    owner = ast.unparse(node.value)
    return (node.attr == "compile" and owner in ("re", "torch")) or node.attr == "eval"


def _loads(call: ast.Call) -> Iterator[str]:
    function = ast.unparse(call.func)
    keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
    if function == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load"
    if keywords.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if keywords.get("trust_remote_code", "False") != "False":
        yield "trust_remote_code"
    if keywords.get("shell", "False") != "False":
        yield "shell"
    if function == "yaml.load" and "Safe" not in ast.unparse(call):
        yield "yaml.load"
    if function.endswith("multiprocessing.connection.Client"):
        yield "multiprocessing.connection"


def sources() -> list[Path]:
    return sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))


def test_our_code_runs_nothing_that_it_reads() -> None:
    assert len(sources()) > 200
    assert {hit for path in sources() for hit in found_in(path)} == set(ALLOWED)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads as innocent", "pickle"),
        ("def f():\n    import dill", "dill"),
        ("from multiprocessing.connection import Listener", "multiprocessing.connection"),
        ("from torch.distributed import rpc", "torch.distributed.rpc"),
        ("import torch.distributed.checkpoint as dcp", "torch.distributed.checkpoint"),
        ("torch.load(file)", "torch.load"),
        ("torch.load(file, weights_only=False)", "torch.load"),
        ("numpy.load(file, allow_pickle=True)", "allow_pickle"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code"),
        ("yaml.load(text)", "yaml.load"),
        ("yaml.load(text, Loader=yaml.FullLoader)", "FullLoader"),
        ("yaml.unsafe_load(text)", "unsafe_load"),
        ("eval(text)", "eval"),
        ("run = exec", "exec"),
        ("subprocess.run(text, shell=True)", "shell"),
        ("dist.broadcast_object_list(values)", "broadcast_object_list"),
        *((harmless, None) for harmless in ("re.compile(text)", "model.eval()", "yaml.safe_load(text)")),
        ("torch.load(file, weights_only=True)", None),
    ],
)
def test_each_way_would_be_seen_and_what_runs_nothing_is_let_be(line: str, what: str | None) -> None:
    hits = {name for _, name in found_in(ROOT / "tepo_megatron" / "planted.py", line)}
    assert any(name == what or name.startswith(f"{what}.") for name in hits) if what else not hits
