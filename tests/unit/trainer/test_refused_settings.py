"""Settings of the trainer that do not go together are refused with the configuration, each with a sentence."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tepo_megatron.config import OptimizerConfig
from tepo_megatron.config.load import ConfigError, load_run

BF16, SPREAD = "model.dtype=bfloat16 ", "model.dtype=bfloat16 optimizer.distributed=true "
FP8, CP = BF16 + "engine.fp8.", "engine.parallel."
LORA, SERVED = "model.lora.rank=4 model.lora.", "model.lora.rank=4 model.lora.serve=adapter "
PRECISE = "rollout.server.quantization=fp8_per_tensor rollout.uncorrected=true "

REFUSED = [
    # FP8
    (FP8 + "recipe=blockwise engine.fp8.amax_history_len=16", "amax_history_len = 16 does nothing with recipe = blockwise"),
    (FP8 + "recipe=mxfp8 engine.fp8={amax_compute_algo: max, margin: 0}", "amax_compute_algo = max does nothing with"),
    (FP8 + "recipe=delayed engine.fp8.first_layers_bf16=1", "1 layers in bfloat16 do not go with recipe = delayed"),
    (SPREAD + "engine.fp8={recipe: delayed, params: true}", "does not go with recipe = delayed"),
    (FP8 + "margin=1", "margin has no effect while recipe = none"),
    (FP8 + "params=true engine.fp8.format=e4m3", "format, params has no effect while recipe = none"),
    ("engine.fp8.recipe=tensorwise", "tensorwise with model.dtype = float32"),
    (FP8 + "recipe=tensorwise engine.fp8.params=true", "engine.fp8.params = true needs optimizer.distributed = true"),
    (FP8 + "recipe=int8", "none.*delayed.*tensorwise.*blockwise.*mxfp8"),
    ("engine.layers=te engine.platform=cpu", "layers = te needs a GPU, and platform = cpu"),
    (FP8 + "recipe=delayed engine.layers=local", "needs Transformer Engine's layers on a GPU, but layers = local"),
    (FP8 + "recipe=delayed engine.platform=cpu", "needs Transformer Engine's layers on a GPU, but platform = cpu"),
    # optimizer states
    (BF16 + "optimizer.offload_fraction=0.5", r"offload_fraction = 0.5 needs optimizer.distributed = true"),
    (BF16 + "optimizer.exp_avg_dtype=bfloat16", r"exp_avg_dtype = bfloat16 needs optimizer.distributed"),
    (SPREAD + "optimizer={offload_fraction: 1, store_param_remainders: true}", r"with offload_fraction, whose states are fp32"),
    (
        SPREAD + "optimizer.exp_avg_sq_dtype=bfloat16 optimizer.betas=[0.9,0.999]",
        r"bfloat16 rounds a step of 0.001 of the mean away",
    ),
    (SPREAD + "optimizer.exp_avg_sq_dtype=fp8", r"betas\[1\] below 0.9375"),
    (
        "optimizer.distributed=true optimizer.exp_avg_dtype=bfloat16",
        r"model.dtype = float32: its Adam has fp32 masters of bfloat16",
    ),
    ("optimizer.distributed=true optimizer.offload_fraction=1", r"optimizer.offload_fraction with model.dtype = float32"),
    (SPREAD + "optimizer.exp_avg_dtype=bfloat16 engine.platform=cpu", r"Adam on a GPU, and engine.platform = cpu"),
    (SPREAD + "optimizer.exp_avg_dtype=fp8 rollout.server.placement=colocated", r"FP8 cannot leave the GPU for the servers'"),
    (
        SPREAD + "optimizer.offload_fraction=1 engine.fp8={recipe: blockwise, params: true}",
        r"offload_fraction with engine.fp8.params = true, which needs masters outside of Adam",
    ),
    # context and expert parallelism
    (CP + "cp_comm_type=a2a", r"cp_comm_type = a2a is for context parallelism, and cp = 1"),
    (CP + "cp=2 engine.parallel.cp_comm_type=a2a engine.platform=cpu", r"cp_comm_type = a2a .* platform = cpu gathers"),
    (CP + "cp=2 engine.parallel.cp_comm_type=a2a engine.layers=local", r"cp_comm_type = a2a .* layers = local gathers"),
    (FP8 + "recipe=delayed engine.parallel.cp=2", r"cp = 2 with fp8.recipe = delayed.*blockwise"),
    (FP8 + "recipe=tensorwise engine.parallel.cp=2", r"cp = 2 with fp8.recipe = tensorwise.*mxfp8"),
    (CP + "cp=2 engine.parallel.ep=4", r"ep × etp = 4 × 1 does not divide the 2 ranks of a pipeline stage"),
    (
        "engine.parallel={pp: 2, vpp: 2, dp: 2} rollout={prompts_per_step: 3, samples_per_prompt: 2} train.minibatches=2",
        r"6 rollouts a step cannot fill train.minibatches = 2 on .*2 for each, as .*vpp = 2",
    ),
    # adapters
    (LORA + "dropout=0.1", r"dropout must be 0: a training step draws no random numbers"),
    (LORA + "target_modules=[]", r"target_modules is empty"),
    (LORA + "target_modules=[q_proj,q_proj]", r"names a layer twice"),
    (LORA + "target_modules=[q_proj,all-linear]", r"all-linear already means every layer"),
    ("model.lora.rank=0", r"got 0; allowed: an integer ≥ 1"),
    ("model.lora.rank=600 model.lora.serve=adapter", r"takes ranks up to 512, .*rank = 600; set .*merged"),
    (SERVED + "rollout.server.placement=colocated", r"servers that keep their weights.*serve = merged"),
    (
        SERVED + "rollout.server.load_format=dummy",
        r"never sends the weights under the adapters; set rollout.server.load_format = auto",
    ),
    (
        SERVED + BF16 + PRECISE,
        r"full precision, and rollout.server.quantization = fp8_per_tensor; set model.lora.serve = merged",
    ),
    ("model.lora.rank=4 " + FP8 + "recipe=tensorwise", r"model\.lora with engine\.fp8\.recipe = tensorwise"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(None, re.split(r" (?=[\w.]+=)", settings))


def test_enough_sequences_for_interleaved_stages_are_taken() -> None:
    load_run(
        None, ["engine.parallel={pp: 2, vpp: 2}", "rollout={prompts_per_step: 3, samples_per_prompt: 2}", "train.minibatches=2"]
    )


@given(st.sampled_from(["bfloat16", "float16"]), st.floats(0.5, 1, exclude_max=True), st.floats(1, 2))
def test_a_mean_that_is_accepted_falls(dtype: str, beta: float, start: float) -> None:
    """Where gradients have become 0 a running mean must go there too."""
    kept = getattr(torch, dtype)
    mean = torch.tensor(start, dtype=kept)
    if (mean.float() * beta).to(kept) < mean:
        return
    with pytest.raises(ValueError, match="so that it never falls"):
        OptimizerConfig(distributed=True, betas=(beta, 0.5), exp_avg_dtype=dtype)
