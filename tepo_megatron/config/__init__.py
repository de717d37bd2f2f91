"""The configuration of a run: pydantic models, filled from YAML and dotted overrides. Every knob exists once. No torch."""

from tepo_megatron.config.cluster import ClusterConfig
from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.engine import EngineConfig, Fp8Config, MoeBalanceConfig, ParallelConfig
from tepo_megatron.config.evaluate import EvaluateConfig
from tepo_megatron.config.log import LogConfig
from tepo_megatron.config.model import LoraConfig, ModelConfig
from tepo_megatron.config.objective.custom import (
    OwnAdvantage,
    OwnAggregation,
    OwnMask,
    OwnMismatch,
    OwnPenalty,
    OwnRatio,
    OwnTrustRegion,
)
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.optimizer import OptimizerConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.config.rollout import RolloutConfig
from tepo_megatron.config.rollout_server import ServerConfig
from tepo_megatron.config.run import RunConfig
from tepo_megatron.config.sampling import SamplingConfig
from tepo_megatron.config.train import TrainConfig

__all__ = [
    "ClusterConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluateConfig",
    "Fp8Config",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "MoeBalanceConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "OwnAdvantage",
    "OwnAggregation",
    "OwnMask",
    "OwnMismatch",
    "OwnPenalty",
    "OwnRatio",
    "OwnTrustRegion",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ServerConfig",
    "TrainConfig",
]
