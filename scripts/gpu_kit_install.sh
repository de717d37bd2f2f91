#!/usr/bin/env bash
# Makes a bare GPU machine ready from gpu-kit/ (scripts/gpu_kit.sh), without a network. To be sourced in the checkout:
#
#   . scripts/gpu_kit_install.sh && bash scripts/gpu_check.sh --only "tests triton,kernels"
#
# It fills a folder outside the checkout, ~/.cache/tepo-kit or $TEPO_KIT_SITE, once for a kit, and sets PYTHONPATH. Nothing else changes.
_tepo_kit() {
  local root kit site python torch capability archive kept cache wanted modules imports
  root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  kit=$root/gpu-kit python=${PYTHON:-python3} cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
  site=${cache:+$cache/tepo-kit}
  site=${TEPO_KIT_SITE:-${site:-${TMPDIR:-/tmp}/tepo-kit-$EUID}}
  [[ -e $kit/.small ]] || { echo "gpu kit: $kit holds no kit; build it where there is a network: bash scripts/gpu_kit.sh" >&2; return 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    { echo "gpu kit: its wheels are for Python 3.12, and $python is $("$python" --version); PYTHON=… names another" >&2; return 1; }
  torch=$("$python" -c 'import torch; print(torch.__version__.partition("+")[0] if torch.version.cuda else "")') ||
    { echo "gpu kit: $python has no torch, which the machine must bring" >&2; return 1; }
  [[ $torch ]] || { echo "gpu kit: the torch of $python was built without CUDA" >&2; return 1; }
  # Python imports what lies there: no other user may have made it.
  if ! (umask 077 && mkdir -p "$site") || [[ -L $site || ! -O $site || (! -e $site/.done && $(ls -A "$site")) ]]; then
    echo "gpu kit: $site is a link, another user's, or holds something else; TEPO_KIT_SITE=/path names a folder for the kit" >&2
    return 1
  fi
  wanted=$({ echo "$torch" && cat "$root/pyproject.toml" && cd "$kit" && find . -maxdepth 1 -type f -exec cksum {} + | sort; } | cksum)
  if [[ ! -e $site/.done || $(<"$site/.done") != "$wanted" ]]; then
    : >"$site/.done"
    find "$site/" -mindepth 1 -maxdepth 1 ! -name .done -exec rm -rf {} + || return # another kit, or a part of one
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$kit"/*.whl || return
    for archive in "$kit"/{te,vllm}-*.tar.xz; do
      [[ -e $archive ]] || continue
      kept=${archive##*-sm} kept=${kept%.tar.xz}
      capability=$("$python" -c 'import torch.cuda as c; print("%d%d" % c.get_device_capability() if c.is_available() else "")') || return
      if [[ $capability && ,$kept, != *,$capability,* ]]; then
        echo "gpu kit: $(basename "$archive") has code for sm_$kept, and this GPU is sm_$capability; without it." \
          "ARCHITECTURES=$capability bash scripts/gpu_kit.sh builds for it" >&2
      elif [[ $(basename "$archive") == *"-$torch-"* ]]; then
        tar -C "$site" -xJf "$archive" || return
      else
        echo "gpu kit: $(basename "$archive") was built for another torch than this machine's $torch; without it" >&2
      fi
    done
    # The checkout is not installed there, and vLLM finds plugins only by their distribution's entry points.
    "$python" - "$root" "$site/tepo_megatron-0.dist-info" <<'PYTHON' || return
import pathlib, sys, tomllib
info = pathlib.Path(sys.argv[2])
info.mkdir(exist_ok=True)
project = tomllib.loads(pathlib.Path(sys.argv[1], "pyproject.toml").read_text())["project"]
lines = ["Metadata-Version: 2.1", "Name: " + project["name"], "Version: 0"]
(info / "METADATA").write_text("\n".join(lines) + "\n")
points = [(group, *point) for group, points in project["entry-points"].items() for point in points.items()]
(info / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {value}\n" for group, name, value in points))
PYTHON
    echo "$wanted" >"$site/.done"
  fi
  export PYTHONPATH=$site:$root${PYTHONPATH:+:$PYTHONPATH}
  imports=("tepo_megatron.cli.main, tepo_megatron.trainer.megatron.engine, tepo_megatron.core.scores")
  [[ ! -e $site/transformer_engine ]] || imports+=("transformer_engine.pytorch")
  if [[ -e $site/vllm ]]; then
    # It has no flashinfer, which vLLM's sampler imports without asking.
    export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
    imports+=("vllm.entrypoints.openai.api_server, vllm.v1.worker.gpu_worker, vllm.v1.worker.gpu.model_runner")
  fi
  for modules in "${imports[@]}"; do
    "$python" -c "import $modules" && continue
    echo "gpu kit: $python does not import that from $site (above); remove it to fill it again, or TEPO_KIT_SITE=/path names another" >&2
    return 1
  done
}
_tepo_kit
