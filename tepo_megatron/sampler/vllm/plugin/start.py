"""Runs ``python -m MODULE ARGUMENTS…`` without garbage collection until the plugin is registered, for faster imports."""

import gc
import runpy
import sys

if __name__ == "__main__":
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
