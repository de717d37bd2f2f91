#!/usr/bin/env bash
# Builds here what a bare GPU machine without a network lacks: a folder of wheels for Python 3.12 and the torch that is there.
#
#   bash scripts/gpu_kit.sh                 gpu-kit/: the trainer with Megatron's own layers, 6 MiB, under a minute
#   bash scripts/gpu_kit.sh --te            also Transformer Engine, for compute capability 9.0 only: 10 MiB more, 15 minutes
#   bash scripts/gpu_kit.sh --vllm          also vLLM and what its server imports, for that capability only: 40 MiB more
#   bash scripts/gpu_kit.sh --rollouts      also recorded rollouts, for the part "replay" of tepo bench gpu: a minute, with .venv
#   bash scripts/gpu_kit.sh --te --check    then imports all of it beside a CUDA build of that torch (needs no GPU)
#
# It goes on where it stopped. On the machine: . scripts/gpu_kit_install.sh. That machine brings torch with CUDA 13, triton,
# transformers and pytest. TORCH=2.11.0 names its torch, ARCHITECTURES=90 what Transformer Engine is kept for, PYTHON a Python 3.12
# for --te and --check, which also need the CUDA 13.0 toolkit (CUDA_HOME, /usr/local/cuda-13.0 by default) and g++.
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
TORCH=${TORCH:-2.11.0} ARCHITECTURES=${ARCHITECTURES:-90}
kit=gpu-kit work=build/gpu-kit/$TORCH
lacking='megatron-core|pydantic|pydantic-core|annotated-types|typing-inspection|omegaconf|antlr4-python3-runtime|math-verify|latex2sympy2-extended'

# What vLLM's server imports for a dense model; a bare machine brings the rest.
serving='vllm|apache-tvm-ffi|astor|blake3|cachetools|cbor2|compressed-tensors|depyf|dill|docstring-parser|fastapi|httpcore2'
serving+='|httptools|httpx2|ijson|interegular|jiter|jmespath|jsonschema|jsonschema-specifications|lark|llguidance|lm-format-enforcer'
serving+='|loguru|mcp|mcp-types|model-hosting-container-standards|msgspec|nvtx|openai|opentelemetry-(api|sdk|semantic-conventions)'
serving+='|oss-harmony|partial-json-parser|prometheus-fastapi-instrumentator|pybase64|pydantic-extra-types|pydantic-settings'
serving+='|python-dotenv|python-json-logger|python-multipart|pyzmq|referencing|rpds-py|setproctitle|sniffio|starlette|truststore|uvicorn'
serving+='|watchfiles|websockets|xgrammar'

te=false check=false rollouts=false vllm=false
for argument in "$@"; do
  case $argument in
    --te) te=true ;;
    --vllm) vllm=true ;;
    --check) check=true ;;
    --rollouts) rollouts=true ;;
    *) die "unknown argument $argument; see the first lines of scripts/gpu_kit.sh" ;;
  esac
done

pin() { grep -E "^$1==" requirements/gpu.txt; }

# make_build_venv: a Python 3.12 with a CUDA build of the machine's torch.
make_build_venv() {
  local python=${PYTHON:-python3.12}
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null ||
    die "$python is no Python 3.12, which the kit is for; name one: PYTHON=/path/to/python3.12 bash scripts/gpu_kit.sh --te"
  if [[ ! -e $work/venv/.done ]]; then
    say "making $work/venv with torch $TORCH and CUDA's libraries (2.5 GB)"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install -qq "torch==$TORCH" setuptools wheel pybind11 ninja packaging einops onnx onnxscript \
      transformers tensorboard typer rich pyarrow matplotlib psutil sentencepiece httpx pyyaml safetensors pytest pytest-timeout hypothesis \
      aiohttp annotated-doc numba prometheus-client py-cpuinfo pillow opencv-python-headless tiktoken urllib3 uvloop # for vLLM
    touch "$work/venv/.done"
  fi
}

mkdir -p "$kit" "$work"
mapfile -t wheels < <(pin "($lacking)")
if [[ ! -e $kit/.small || $(<"$kit/.small") != "${wheels[*]}" ]]; then
  say "fetching ${#wheels[@]} wheels for Python 3.12"
  rm -f "$kit"/*.whl # of other versions, which would stop the installation
  platforms=()
  for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  python=$(find_python)
  for wheel in "${wheels[@]}"; do
    "$python" -m pip download -qq --no-deps --only-binary :all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$kit" "$wheel" 2>/dev/null ||
      "$python" -m pip wheel -qq --no-deps -w "$kit" "$wheel" || die "$wheel has neither a wheel for Python 3.12 nor a source that builds"
  done
  echo "${wheels[*]}" >"$kit/.small"
fi

if $rollouts && [[ ! -d $kit/rollouts ]]; then
  say "recording the rollouts of four steps of examples/tiny"
  rm -rf "$work/recorded"
  .venv/bin/tepo train examples/tiny/run.yaml "output=$work/recorded" train.steps=4 rollout.record=true evaluate.every=0 \
    engine.parallel.tp=1 engine.parallel.sequence_parallel=false log.progress=plain
  mv "$work/recorded/rollouts" "$kit/rollouts"
fi

if $te; then
  core=$(pin transformer-engine-cu13) front=$(pin transformer-engine)
  torch_part="transformer-engine-torch==${core##*==}" built=te-$TORCH-sm$ARCHITECTURES.tar.xz
  if [[ ! -e $kit/$built ]]; then
    make_build_venv
    export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda-13.0} NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-$(nproc)}
    [[ -x $CUDA_HOME/bin/nvcc ]] || die "no CUDA toolkit in $CUDA_HOME; name the one of CUDA 13.0: CUDA_HOME=/path"
    "$work/venv/bin/python" -m pip install -qq --no-deps "$core" "$front"
    site=$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    if ! ls "$work"/transformer_engine_torch-*.whl >/dev/null 2>&1; then
      say "building Transformer Engine's torch part for torch $TORCH (about ten minutes on two cores)"
      CPLUS_INCLUDE_PATH=$site/nvidia/cu13/include:$site/nvidia/cudnn/include:$site/nvidia/nccl/include PATH=$PWD/$work/venv/bin:$PATH \
        "$work/venv/bin/python" -m pip wheel -qq --no-build-isolation --no-deps -w "$work" "$torch_part"
    fi
    say "keeping Transformer Engine's code for sm_$ARCHITECTURES"
    rm -rf "$work/te"
    "$work/venv/bin/python" -m pip install -qq --no-deps --no-compile --target "$work/te" "$core" "$front" "$work"/transformer_engine_torch-*.whl
    library=$(find "$work/te" -name 'libtransformer_engine.so')
    "$work/venv/bin/python" scripts/trim_fatbin.py "$library" "$work/trimmed.so" "$ARCHITECTURES"
    mv "$work/trimmed.so" "$library"
    XZ_OPT=-T0 tar -C "$work/te" -cJf "$kit/$built.part" .
    mv "$kit/$built.part" "$kit/$built"
  fi
fi

if $vllm && [[ ! -e $kit/vllm-$TORCH-sm$ARCHITECTURES.tar.xz ]]; then
  make_build_venv
  say "fetching vLLM (0.3 GB), and keeping its code for sm_$ARCHITECTURES"
  mapfile -t wheels < <(pin "($serving)")
  rm -rf "$work/vllm"
  "$work/venv/bin/python" -m pip install -qq --no-deps --no-compile --target "$work/vllm" "${wheels[@]}"
  # FlashAttention 2, and kernels of models and formats that are not served here.
  (CDPATH='' cd "$work/vllm/vllm" && rm -rf vllm-rs vllm_flash_attn/_vllm_fa2_C* _{flashkda,deepselect,flashmla,qutlass}_C* third_party/{deep_gemm,fmha_sm100})
  for library in _C_stable_libtorch _moe_C_stable_libtorch vllm_flash_attn/_vllm_fa3_C; do
    library=$work/vllm/vllm/$library.abi3.so
    "$work/venv/bin/python" scripts/trim_fatbin.py "$library" "$work/trimmed.so" "$ARCHITECTURES"
    mv "$work/trimmed.so" "$library"
  done
  XZ_OPT='-T0 -9' tar -C "$work/vllm" -cJf "$kit/vllm.part" .
  mv "$kit/vllm.part" "$kit/vllm-$TORCH-sm$ARCHITECTURES.tar.xz"
fi

if $check; then
  make_build_venv
  TEPO_KIT_SITE=$work/site PYTHON="$work/venv/bin/python" bash -c '. scripts/gpu_kit_install.sh'
  say "the kit imports beside torch $TORCH"
fi
say "$(du -sh "$kit" | cut -f1) in $kit: $(find "$kit" -maxdepth 1 -type f -name '[!.]*' | wc -l) files"
