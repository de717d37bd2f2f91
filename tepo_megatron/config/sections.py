"""The sections of a run, and values that follow from several; ``run`` checks that they fit."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tepo_megatron.config.base import Section
from tepo_megatron.config.cluster import ClusterConfig
from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.engine import EngineConfig
from tepo_megatron.config.environment import EnvironmentConfig
from tepo_megatron.config.evaluate import EvaluateConfig
from tepo_megatron.config.log import LogConfig
from tepo_megatron.config.model import ModelConfig
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.optimizer import OptimizerConfig
from tepo_megatron.config.reward import RewardConfig
from tepo_megatron.config.rollout import RolloutConfig
from tepo_megatron.config.train import TrainConfig


class RunSections(Section):
    """Fields of :class:`RunConfig`, which everybody uses."""

    name: Annotated[str, Field(min_length=1, max_length=200)] = "run"
    """Run name in progress view, pictures and plans: printable, without the slash."""

    output: Path = Path("out/run")
    """Folder for everything that the run writes; not in /proc, /sys or /dev, except /dev/shm."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random: problem order, sampling, evaluation, mini-batches. On a CPU equal seed and rollouts give equal
    weights, bit for bit."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    """Default: none; each response is one turn, scored by ``reward.verifier``."""

    objective: ObjectiveConfig = ObjectiveConfig()
    engine: EngineConfig = EngineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def adapter_rank(self) -> int | None:
        """Rank of adapters sent apart from the weights; None if servers get merged weights."""
        lora = self.model.lora
        return lora.rank if lora is not None and lora.serve == "adapter" and self.rollout.replay is None else None

    @property
    def servers_need_tokenizer(self) -> bool:
        return self.rollout.sampling.needs_tokenizer

    @property
    def fewest_sequences(self) -> int:
        """Sequences that a step's mini-batches need: a group of micro-batches per data-parallel rank."""
        parallel = self.engine.parallel
        return self.train.minibatches * parallel.dp * parallel.micro_batch_group
