"""``log``: display and records of a run."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from tepo_megatron.config.base import Seconds, Section

Name = Annotated[str, Field(min_length=1, max_length=250)]
Tag = Annotated[str, Field(min_length=1, max_length=64)]

_NOT_IN_PROJECTS = "/\\#?%:"


class WandbConfig(Section):
    """A Weights & Biases run with the rows of ``metrics.jsonl`` and the configuration without secrets. Needs
    ``tepo-megatron[wandb]``. The key is that of ``wandb login`` or WANDB_API_KEY."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    """W&B project of the run."""

    entity: Name | None = None
    """User or team that owns the project. null: W&B's default."""

    name: Name | None = None
    """Run name in W&B. null: the run's ``name``."""

    group: Name | None = None
    """Group in W&B, such as the seeds of one setting. null: none."""

    tags: tuple[Tag, ...] = ()
    """Tags of the run."""

    mode: Literal["online", "offline"] = "online"
    """``offline``: kept in ``OUT/wandb`` until ``wandb sync`` sends it. ``online``: sent during the run; written offline if W&B
    is never reached."""

    @field_validator("project")
    @classmethod
    def _project_is_taken_by_wandb(cls, project: str) -> str:
        wrong = [character for character in _NOT_IN_PROJECTS if character in project]
        if wrong:
            raise ValueError(
                f"W&B takes no {' '.join(wrong)} in the name of a project; leave it out, and name a team in entity"
            )
        return project


class MlflowConfig(Section):
    """An MLflow run with the rows of ``metrics.jsonl``, and the configuration without secrets as parameters. Needs
    ``tepo-megatron[mlflow]``."""

    experiment_name: Name
    """MLflow experiment; made if missing."""

    run_name: Name | None = None
    """Run name in MLflow. null: the run's ``name``."""

    tracking_uri: str | None = None
    """Tracking server, or a database such as ``sqlite:////shared/mlflow.db``. null: MLFLOW_TRACKING_URI, else
    ``OUT/mlflow/mlflow.db``. No password."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""

    @field_validator("tracking_uri")
    @classmethod
    def _uri_has_a_scheme_and_no_password(cls, uri: str | None) -> str | None:
        if uri is None:
            return uri
        try:
            parts = urlsplit(uri)
            password = parts.password
        except ValueError as error:
            raise ValueError(f"{uri!r} is no address: {error}") from error
        if password is not None:
            raise ValueError(
                "an address with a password in it would be kept in the run's folder; give the address without it, and the "
                "password by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole by MLFLOW_TRACKING_URI"
            )
        if not parts.scheme or parts.scheme == "file":
            raise ValueError(
                f"{uri!r} is a folder, which MLflow 3 no longer writes to; give a database (sqlite:////path/mlflow.db) or the "
                "address of a server, or leave it out"
            )
        return uri


class LogConfig(Section):
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """``live``: redraws itself; ``plain``: a line per step; ``none``. ``auto``: live on a terminal, plain in a file or pipe."""

    tensorboard: bool = True
    """Also write TensorBoard events to ``<output>/tensorboard``; ``metrics.jsonl`` is always written."""

    wandb: WandbConfig | None = None
    """Also log to Weights & Biases. null: off."""

    mlflow: MlflowConfig | None = None
    """Also log to MLflow. null: off."""

    finish_timeout_s: Seconds = 30.0
    """Seconds that the run's end waits for W&B and MLflow to accept remaining rows, or less if the run has less. Others are
    reported and stay in ``metrics.jsonl``."""

    train_samples: NonNegativeInt = 0
    """First responses of each training step in ``train_samples.jsonl``, with prompt, expected answer and reward; ``tepo samples
    OUT --train`` shows them. 0: none; ``rollout.record`` keeps all, with tokens."""

    token_samples: NonNegativeInt = 0
    """First groups of a step written token by token to ``<output>/tokens``: log-probs of sampler and trainer, entropy and its
    change, advantage, mask, ratio, version; ``tepo report`` shows them. About 20 bytes a token; 0: none."""

    token_samples_every: PositiveInt = 10
    """Steps between files of ``token_samples``."""

    def records_tokens(self, step: int) -> bool:
        """Whether a step writes token values; ``step`` counts steps done after it, as in its row."""
        return bool(self.token_samples) and step % self.token_samples_every == 0
