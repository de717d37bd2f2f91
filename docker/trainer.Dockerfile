# The trainer on GPUs: Megatron-Core with Transformer Engine and NVIDIA's apex. Build in the checkout:
#   docker build -f docker/trainer.Dockerfile -t tepo-trainer .
# For a site without a network: --build-arg BASE=registry.inner/cuda:13.0.2-cudnn-devel-ubuntu24.04 --build-arg
# APEX=https://git.inner/apex, and PIP_INDEX_URL. The base brings CUDA's compiler and cuDNN.
# Versions are those of requirements/gpu.txt and docker/pins.txt, the servers' too. NVIDIA's own PyTorch image would bring another NCCL than vLLM's.
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update && apt-get install -y --no-install-recommends git g++ ninja-build python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

ARG PIP_INDEX_URL
COPY docker/pins.txt requirements/gpu.txt /etc/tepo/
ENV PIP_CONSTRAINT="/etc/tepo/pins.txt /etc/tepo/gpu.txt" CUDA_HOME=/usr/local/cuda \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore HF_HUB_OFFLINE=1
RUN pip install torch nvidia-nccl-cu13 setuptools wheel pybind11 ninja packaging

# PyPI's "apex" is another project: NVIDIA's is built from source. This commit is of 2026-07: torch builds extensions as C++20,
# which apex' release 25.09 is older than. Without the list it would compile for seven architectures.
ARG APEX=https://github.com/NVIDIA/apex
ARG APEX_REF=6424da3b4faa6c8f062da4a48c424fff3f02d42d
RUN git init -q /tmp/apex && git -C /tmp/apex fetch -q --depth 1 "${APEX}" "${APEX_REF}" && git -C /tmp/apex checkout -q FETCH_HEAD && \
    TORCH_CUDA_ARCH_LIST=9.0 APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex && rm -rf /tmp/apex

# Transformer Engine's torch part is built here, against the headers of NCCL that came with torch.
RUN site=$(python -c 'import site; print(site.getsitepackages()[0])') && \
    CPLUS_INCLUDE_PATH="${site}/nvidia/nccl/include" NVTE_FRAMEWORK=pytorch \
    pip install --no-build-isolation transformer-engine transformer-engine-cu13 transformer-engine-torch

COPY . /opt/tepo-megatron
WORKDIR /opt/tepo-megatron
RUN pip install megatron-core math-verify transformers /opt/tepo-megatron

# Checked where the image is made: that it is what the pins say, and that the compiled parts which the engine uses load: apex'
# sum of weight gradients in fp32, and Transformer Engine. No GPU is needed for it.
RUN python docker/check_pins.py torch nvidia-nccl-cu13 transformer-engine megatron-core && python -c "\
import torch, megatron.core, tepo_megatron.cli.main; \
assert torch.version.cuda, 'torch without CUDA'; \
import fused_weight_gradient_mlp_cuda, transformer_engine.pytorch"
