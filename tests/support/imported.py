"""What the process that ranks are forked from imports, before there is any rank."""

import gc
import warnings

gc.disable()  # a collection walks a million objects, and in a rank copies their pages
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tepo_megatron.run.training
    import tepo_megatron.sampler.rollout_file
    import tepo_megatron.tools.faults.preloaded  # noqa: F401
gc.collect()
gc.freeze()
gc.enable()
