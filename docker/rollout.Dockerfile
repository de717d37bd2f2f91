# The servers: vLLM, and this package for its plugin. Build in the checkout:
#   docker build -f docker/rollout.Dockerfile -t tepo-rollout .
# For a site without a network: --build-arg BASE=registry.inner/vllm-openai:v0.32.0, and PIP_INDEX_URL.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}

ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore HF_HUB_OFFLINE=1

# --no-deps: vLLM's own pins stay. Beside them `tepo serve` imports only these; the trainer's needs are not installed.
COPY . /opt/tepo-megatron
RUN python3 -m pip install --no-deps /opt/tepo-megatron && \
    python3 -m pip install omegaconf 'pydantic>=2.12' 'typer>=0.15' 'rich>=13' && \
    ln -sf "$(command -v python3)" /usr/local/bin/python

# The image's own entry point starts a server without our key: `tepo serve` does.
ENTRYPOINT []

# Checked where the image is made: vLLM's version, and that it finds the plugin.
RUN python -c "\
import importlib.metadata as m; \
v = m.version('vllm'); \
assert v.startswith('0.32.'), f'vllm {v} is not 0.32'; \
assert 'tepo_megatron' in [p.name for p in m.entry_points(group='vllm.general_plugins')]; \
import tepo_megatron.rollout.serve, tepo_megatron.data.builtin, tepo_megatron.cli.main"
