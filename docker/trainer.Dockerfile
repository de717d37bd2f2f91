# The trainer on GPUs: Megatron-Core with Transformer Engine and NVIDIA's apex. Build in the checkout:
#   docker build -f docker/trainer.Dockerfile -t tepo-trainer .
# For a site without a network: --build-arg BASE=registry.inner/pytorch:25.11-py3 --build-arg APEX=https://git.inner/apex,
# and PIP_INDEX_URL. The base brings CUDA's compiler, cuDNN and a torch that was built for them.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}

ARG APEX=https://github.com/NVIDIA/apex
ARG APEX_REF=25.09
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore HF_HUB_OFFLINE=1

# The base's torch stays; what else the base constrains would be in the way of our pins.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" >/etc/tepo-base.txt
ENV PIP_CONSTRAINT=/etc/tepo-base.txt

# PyPI's "apex" is another project: NVIDIA's is built from source, unless the base has it.
RUN python -c "import amp_C" 2>/dev/null || ( \
      git clone --depth 1 --branch "${APEX_REF}" "${APEX}" /tmp/apex && \
      APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation /tmp/apex && \
      rm -rf /tmp/apex )

RUN pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9,<2.12'

COPY . /opt/tepo-megatron
RUN pip install megatron-core==0.16.1 math-verify==0.9.0 'transformers>=5.16.1,<5.20' /opt/tepo-megatron

# Checked where the image is made: versions by what doctor asks for, and that the compiled parts load. No GPU is needed for it.
RUN python -c "\
import importlib.metadata as m; \
from packaging.specifiers import SpecifierSet as S; \
import torch, megatron.core, tepo_megatron.cli.main; \
assert torch.version.cuda, 'torch without CUDA'; \
te = m.version('transformer-engine'); \
assert S('>=2.9,<2.12').contains(te, prereleases=True), f'transformer-engine {te} is not >=2.9,<2.12'; \
assert m.version('megatron-core') == '0.16.1'; \
import amp_C"
