# The servers: vLLM, and this package for its plugin. Build in the checkout:
#   docker build -f docker/rollout.Dockerfile -t tepo-rollout .
# For a site without a network: --build-arg BASE=registry.inner/cuda:13.0.2-cudnn-devel-ubuntu24.04, and PIP_INDEX_URL.
# Versions are those of requirements/gpu.txt and docker/pins.txt, the trainer's too. vLLM's own image would bring another NCCL than the trainer's.
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv && rm -rf /var/lib/apt/lists/* && \
    python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

ARG PIP_INDEX_URL
COPY docker/pins.txt requirements/gpu.txt /etc/tepo/
# vLLM brings a newer compiler of CUDA by pip; what compiles at run time must take the base's, which fits the driver.
ENV PIP_CONSTRAINT="/etc/tepo/pins.txt /etc/tepo/gpu.txt" CUDA_HOME=/usr/local/cuda \
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore HF_HUB_OFFLINE=1
RUN pip install torch nvidia-nccl-cu13 vllm

# --no-deps: vLLM's own needs stay. Beside them `tepo serve` imports only these; the trainer's are not installed.
COPY . /opt/tepo-megatron
WORKDIR /opt/tepo-megatron
RUN pip install --no-deps /opt/tepo-megatron && pip install omegaconf 'pydantic>=2.12' 'typer>=0.15' 'rich>=13'

# Checked where the image is made: that it is what the pins say, and that vLLM finds the plugin.
RUN python docker/check_pins.py torch nvidia-nccl-cu13 vllm && python -c "\
import importlib.metadata as m; \
assert 'tepo_megatron' in [p.name for p in m.entry_points(group='vllm.general_plugins')]; \
import tepo_megatron.sampler.fleet.external, tepo_megatron.tasks.data.builtin, tepo_megatron.cli.main"
