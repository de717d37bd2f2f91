"""Every knob once: pydantic models, filled from YAML and dotted overrides. No torch."""

from tepo_megatron.config.cluster import ClusterConfig
from tepo_megatron.config.data import DataConfig, EvaluateConfig, RewardConfig
from tepo_megatron.config.engine import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig
from tepo_megatron.config.fp8 import Fp8Config
from tepo_megatron.config.objective import ObjectiveConfig
from tepo_megatron.config.rollout import RolloutConfig, SamplingConfig, ServerConfig
from tepo_megatron.config.run import RunConfig
from tepo_megatron.config.train import LogConfig, TrainConfig

__all__ = [
    "ClusterConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluateConfig",
    "Fp8Config",
    "LogConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ServerConfig",
    "TrainConfig",
]
