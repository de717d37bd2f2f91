"""What the process that ranks are forked from imports, before there is any rank."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tepo_megatron.run.training
    import tepo_megatron.sampler.rollout_file
    import tepo_megatron.trainer.megatron.engine  # noqa: F401
