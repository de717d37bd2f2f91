"""``log``: what is shown and kept of a run."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from tepo_megatron.config.base import Seconds, Section
from tepo_megatron.config.loggers import MlflowConfig, WandbConfig


class LogConfig(Section):
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """How the run shows its progress: ``live``, a view that redraws itself; ``plain``, a line for each step; ``none``.
    ``auto``: live on a terminal, plain in a file or a pipe."""

    tensorboard: bool = True
    """Also write the metrics as TensorBoard events, to ``<output>/tensorboard``; ``metrics.jsonl`` is written always."""

    wandb: WandbConfig | None = None
    """Also log to Weights & Biases. null: not."""

    mlflow: MlflowConfig | None = None
    """Also log to MLflow. null: not."""

    finish_timeout_s: Seconds = 30.0
    """How long the end of a run waits for W&B and MLflow to take what is left; a run with less time waits less. What they have
    not taken then is said, and stays in ``metrics.jsonl``."""

    train_samples: NonNegativeInt = 0
    """Responses of every training step written to ``train_samples.jsonl``, the first ones: prompt, expected answer, response,
    reward. ``tepo samples OUT --train`` shows them. 0: none; ``rollout.record`` keeps every response with its tokens."""

    token_samples: NonNegativeInt = 0
    """Groups of a step whose responses are written token by token to ``<output>/tokens``, the first ones: log-probs of sampler
    and trainer, entropy and its change, advantage, mask, ratio, version. ``tepo report`` shows them. About 20 bytes a token;
    0: none, and nothing is computed for it."""

    token_samples_every: PositiveInt = 10
    """Every how many steps ``token_samples`` are written: a file for each of them."""

    def records_tokens(self, step: int) -> bool:
        """Whether token values of a step are written; ``step``: steps done after it, as its row says."""
        return bool(self.token_samples) and step % self.token_samples_every == 0
