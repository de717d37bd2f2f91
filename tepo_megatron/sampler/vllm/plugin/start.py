"""``python -m tepo_megatron.sampler.vllm.plugin.start MODULE ARGUMENTS…``: as ``python -m MODULE ARGUMENTS…``, but the garbage
collector does not interrupt its imports.

What vLLM and torch make as they are imported stays. Python would go through all of it again and again meanwhile, which takes a
sixth of the time. The collector goes on when the plugin is registered.
"""

from __future__ import annotations

import gc
import runpy
import sys


def main() -> None:
    """Runs the module that the first argument names, as the main program, with the arguments after it."""
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
