"""The configuration of a run: pydantic models, filled from YAML and overrides, without torch."""

from tepo_megatron.config.cluster import ClusterConfig
from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.engine import EngineConfig, Fp8Config, LoraConfig, ModelConfig, MoeBalanceConfig, ParallelConfig
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.config.rollout import RolloutConfig, SamplingConfig
from tepo_megatron.config.run import RunConfig
from tepo_megatron.config.train import LogConfig, OptimizerConfig, TrainConfig

__all__ = [
    "ClusterConfig",
    "DataConfig",
    "EngineConfig",
    "Fp8Config",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "MoeBalanceConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainConfig",
]
