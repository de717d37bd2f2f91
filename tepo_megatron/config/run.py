"""A whole run."""

from pathlib import Path

from pydantic import model_validator

from tepo_megatron.config.base import Section
from tepo_megatron.config.cluster import ClusterConfig
from tepo_megatron.config.data import DataConfig, EvaluateConfig, RewardConfig
from tepo_megatron.config.engine import EngineConfig, ModelConfig, OptimizerConfig
from tepo_megatron.config.objective import ObjectiveConfig
from tepo_megatron.config.rollout import RolloutConfig
from tepo_megatron.config.train import LogConfig, TrainConfig


class RunConfig(Section):
    name: str = "run"
    output: Path = Path("out/run")
    """Everything that the run writes goes below this folder."""

    seed: int = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    engine: EngineConfig = EngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _minibatches_have_work(self) -> "RunConfig":
        sequences = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        needed = self.train.minibatches * self.engine.parallel.dp
        if sequences < needed:
            raise ValueError(
                f"{sequences} rollouts a step cannot fill train.minibatches = {self.train.minibatches} on "
                f"engine.parallel.dp = {self.engine.parallel.dp} ranks; raise rollout.prompts_per_step or "
                "samples_per_prompt, or lower train.minibatches"
            )
        return self
