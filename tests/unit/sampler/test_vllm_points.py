"""What the package names of vLLM is in vLLM's source, which is read here and not imported.

``VLLM_SOURCE=…/vllm pytest tests/unit/sampler/test_vllm_points.py`` asks another version, such as an unpacked wheel of GPUs.
"""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import tepo_megatron
from tepo_megatron.sampler.vllm import resources, server, wire

PACKAGE = Path(tepo_megatron.__file__).parent
SOURCE = Path(os.environ.get("VLLM_SOURCE") or (getattr(find_spec("vllm"), "submodule_search_locations", None) or [""])[0])
pytestmark = pytest.mark.skipif(not SOURCE.name, reason="there is no vLLM, and VLLM_SOURCE names none")
MEMBERS = """
AsyncLLM abort collective_rpc generate model_config output_handler output_processor shutdown vllm_config
AuxOutputWorkerConnector begin_step close prepare_output; Worker get_model_inspection model_runner rank weight_transfer_engine
CompletionOutput finish_reason logprobs routed_experts token_ids weight_versions; InputBatch num_computed_tokens_cpu req_ids
FusedMoEConfig intermediate_size_per_partition intermediate_size_per_partition_unpadded
FlatLogprobs logprobs token_ids; LayerReloadingInfo restore_metadata; RequestState detokenizer; WeightVersionSpan start version
GPUModelRunner get_model input_batch query_start_loc sampler; ModelRunnerOutput aux_output_connector_output sampled_token_ids
GenerateRequest model priority sampling_params token_ids; VocabParallelEmbeddingShardIndices num_org_elements
GenerateResponseBase prompt_logprobs; ModelConfig get_vocab_size head_dtype; UnquantizedFusedMoEMethod moe_kernel
GracefulHTTPError http_status; Logprob logprob rank; OutputProcessor request_states; VllmConfig use_v2_model_runner
IncrementalDetokenizer num_output_tokens; OnlineLinearBase requantization_source; RequestOutput num_cached_tokens outputs
LoRAModelManager model packed_modules_mapping supported_lora_modules; WorkerLoRAManager _adapter_manager lora_config vocab_size
OpenAIServingModels load_lora_adapter lora_requests; SchedulerOutput aux_output_connector_metadata total_num_scheduled_tokens
PendingAuxOutput enqueue_cpu_copy process_output; VocabParallelEmbedding quant_method shard_indices
SamplingParams bad_words ignore_eos min_p output_kind prompt_logprobs skip_reading_prefix_cache stop stop_token_ids top_k top_p
"""  # of objects that come to the plugin without a type


def tree(module: str) -> ast.Module | None:
    path = SOURCE.joinpath(*module.split(".")[1:])
    files = (path / "__init__.py", path.parent / f"{path.name}.py")
    return next((ast.parse(file.read_text()) for file in files if file.is_file()), None)


def statements(parent: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(parent):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from statements(child)


@cache
def find(dotted: str) -> tuple[str, ast.AST] | None:
    """The definition and its module; follows imports and base classes."""
    dotted = dotted.replace("vllm.platforms.current_platform", "vllm.platforms.interface.Platform")
    if (module := tree(dotted)) is not None:
        return dotted, module
    owner, _, name = dotted.rpartition(".")
    home, node = (find(owner) if owner else None) or ("", None)
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in statements(node):
            if isinstance(child, ast.ImportFrom):
                for alias in (one for one in child.names if name == (one.asname or one.name)):
                    level = child.level - SOURCE.joinpath(*home.split(".")[1:]).is_dir()  # a package is its own parent
                    parents = home.split(".")[: -level or None] if child.level else []
                    return find(".".join([*parents, *filter(None, [child.module]), alias.name]))
            targets = getattr(child, "targets", [getattr(child, "target", None)])
            if name in (getattr(child, "name", None), *(getattr(target, "id", None) for target in targets)):
                return home, child
    if isinstance(node, ast.ClassDef) and re.search(rf"\bself\.{name}(: .+)? = ", ast.unparse(node)):
        return home, node
    bases = (ast.unparse(base).partition("[")[0] for base in getattr(node, "bases", ()))
    return next(filter(None, (find(f"{home}.{base}.{name}") for base in bases)), None)


def is_there(point: str) -> bool:
    dotted, _, keyword = point.rstrip(")").partition("(")
    _, called = find(f"{dotted}.__init__") or find(dotted) or ("", None)
    if not keyword or not isinstance(called, ast.FunctionDef):
        return find(f"{dotted}.{keyword}".strip(".")) is not None
    return called.args.kwarg is not None or keyword in {one.arg for one in (*called.args.args, *called.args.kwonlyargs)}


def words(folder: str, pattern: str) -> set[str]:
    """Whole strings of ours."""
    nodes = (node for path in (PACKAGE / folder).rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return {str(node.value) for node in nodes if isinstance(node, ast.Constant) and re.fullmatch(pattern, str(node.value))}


def points(file: ast.AST) -> Iterator[str]:
    """``vllm.module.name``, also that our subclasses use, and ``vllm.module.name(keyword)``."""
    names = {"vllm": "vllm"}
    for node in ast.walk(file):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from names.values()
    for node in ast.walk(file):
        called = node.func if isinstance(node, ast.Call) else node
        owner, _, member = ast.unparse(called).rpartition(".") if isinstance(called, ast.Attribute | ast.Name) else ("", "", "")
        dotted = names.get(member) if not owner else f"{names[owner]}.{member}" if owner in names else None
        if dotted and not member.startswith("tepo_"):
            yield dotted
            yield from (f"{dotted}({keyword.arg})" for keyword in getattr(node, "keywords", ()) if keyword.arg)
        for base in (ast.unparse(base).partition("[")[0] for base in getattr(node, "bases", ())):
            for how, name in re.findall(r"\b(self|super\(\))\.(\w+)", text := ast.unparse(node)) if base in names else ():
                if how != "self" or not re.search(rf"^    (def )?{name}\b", text, re.MULTILINE):
                    yield f"{names[base]}.{name}"


def test_every_name_is_there() -> None:
    wanted = {one for path in (PACKAGE / "sampler/vllm/plugin").rglob("*.py") for one in points(ast.parse(path.read_text()))}
    assert sorted(point for point in wanted | words("sampler", r"vllm(\.\w+)+") if not is_there(point)) == []
    assert not any(map(is_there, ("vllm.config.VllmConfig.no", "vllm.envs.NO", "vllm.inputs.engine.tokens_input(no)")))
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            homes.setdefault(name, []).append(".".join(["vllm", *path.relative_to(SOURCE).with_suffix("").parts, name]))
    for owner, *names in map(str.split, re.split("[;\n]", MEMBERS.strip())):
        assert any(all(is_there(f"{home}.{name}") for name in names) for home in homes[owner]), (owner, names)


def test_every_flag_variable_limit_and_text_of_a_log_is_there() -> None:
    text = "\n".join(file.read_text() for file in (SOURCE / "engine/arg_utils.py", *SOURCE.rglob("cli_args.py")))
    known = {*re.findall(r'"--([\w-]+)"', text), *(name.replace("_", "-") for name in re.findall(r"^ +(\w+): ", text, re.M))}
    flags = {flag[2:].removeprefix("no-") for flag in words("sampler/vllm", "--[a-z][a-z-]+")}
    assert {"worker-cls", "middleware"} <= flags <= known
    variables = words("sampler", "VLLM_[A-Z_]+") | words("runtime", "VLLM_[A-Z_]+")
    assert variables <= set(re.findall("VLLM_[A-Z_]+", (SOURCE / "envs.py").read_text()))
    head_sizes = "v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes"
    for name, limits in (("config.lora.MaxLoRARanks", server._LORA_RANKS), (head_sizes, resources.CPU_HEAD_SIZES)):
        _, definition = find(f"vllm.{name}") or ("", ast.Module([], []))
        assert [node.value for node in ast.walk(definition) if isinstance(node, ast.Constant)] == list(limits)
    log = re.sub(r'"\n\s+f?"', "", "\n".join(file.read_text() for file in (SOURCE / "v1").rglob("*.py")))  # joins sentences
    for logged in server._CONSEQUENCES.pattern.partition("|KeyError")[0].split("|"):
        assert re.search(logged, log), logged


def test_every_route_is_there_with_what_the_client_sends() -> None:
    texts = (file.read_text() for file in (SOURCE / "entrypoints").rglob("*.py"))
    served = {text: set(re.findall(r'(?:\.(?:get|post)|Mount)\(\s*"(/[\w/]+)"', text)) for text in texts}
    routes = {route.partition("?")[0] for route in words("sampler/vllm", r"/(?!proc)[\w/]+(\?.*)?")}
    routes -= set(map(str, vars(wire).values()))
    assert {"/pause", "/inference/v1/generate", "/metrics"} <= routes <= set().union(*served.values())
    client = (PACKAGE / "sampler/vllm/client.py").read_text()
    sent = {*re.findall(r"[?&](\w+)=", client), *re.findall(r'_post\("[^"]+", \{"(\w+)"', client)}
    known = {word for text, own in served.items() if own & routes for word in re.findall(r"\w+", text)}
    assert {"clear_cache", "init_info"} <= sent <= known
