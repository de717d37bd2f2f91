"""What the process that ranks are forked from imports, before there is any rank."""

import warnings

warnings.filterwarnings("ignore")

import tepo_megatron.engine.engine  # noqa: E402
import tepo_megatron.rollout.record  # noqa: E402
import tepo_megatron.train.minibatches  # noqa: E402, F401
