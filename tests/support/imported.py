"""What the process that ranks are forked from imports, before there is any rank."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tepo_megatron.engine.engine
    import tepo_megatron.rollout.record
    import tepo_megatron.train.minibatches  # noqa: F401
