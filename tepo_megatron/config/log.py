"""``log``: what is shown and kept of a run."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from tepo_megatron.config.base import Seconds, Section

Name = Annotated[str, Field(min_length=1, max_length=250)]
Tag = Annotated[str, Field(min_length=1, max_length=64)]

_NOT_IN_PROJECTS = "/\\#?%:"


class WandbConfig(Section):
    """A run of Weights & Biases with the rows of ``metrics.jsonl`` and the configuration without secrets. Needs the extra
    ``tepo-megatron[wandb]``. The key is read from the place of ``wandb login`` or from WANDB_API_KEY."""

    project: Annotated[str, Field(min_length=1, max_length=128)]
    """W&B project of the run."""

    entity: Name | None = None
    """User or team that owns the project. null: W&B's default for the key."""

    name: Name | None = None
    """Name of the run in W&B. null: the run's ``name``."""

    group: Name | None = None
    """Group of the run in W&B, such as the seeds of one setting. null: none."""

    tags: tuple[Tag, ...] = ()
    """Tags of the run."""

    mode: Literal["online", "offline"] = "online"
    """``offline``: nothing leaves the machine; the run is in ``OUT/wandb``, and ``wandb sync`` sends it later. ``online``: it
    is sent during the run; if W&B is not reached until the end, it is written as an offline run."""

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
    """A run of MLflow with the rows of ``metrics.jsonl``, and the configuration without secrets as its parameters. Needs the
    extra ``tepo-megatron[mlflow]``.
    """

    experiment_name: Name
    """MLflow experiment of the run; made if it does not exist."""

    run_name: Name | None = None
    """Name of the run in MLflow. null: the run's ``name``."""

    tracking_uri: str | None = None
    """Address of a tracking server, or a database such as ``sqlite:////shared/mlflow.db``. null: MLFLOW_TRACKING_URI, else the
    run's own ``OUT/mlflow/mlflow.db``, which needs no network. Not for a password."""

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
    """Display of progress: ``live``, a view that redraws itself; ``plain``, a line for each step; ``none``. ``auto``: live on a
    terminal, plain in a file or a pipe."""

    tensorboard: bool = True
    """Also write the metrics as TensorBoard events, to ``<output>/tensorboard``; ``metrics.jsonl`` is written always."""

    wandb: WandbConfig | None = None
    """Also log to Weights & Biases. null: off."""

    mlflow: MlflowConfig | None = None
    """Also log to MLflow. null: off."""

    finish_timeout_s: Seconds = 30.0
    """Seconds that the end of a run waits for W&B and MLflow to accept the remaining rows; a run with less time waits less.
    Rows that are not accepted are reported, and stay in ``metrics.jsonl``."""

    train_samples: NonNegativeInt = 0
    """Number of responses of every training step written to ``train_samples.jsonl``, the first ones: prompt, expected answer,
    response, reward. ``tepo samples OUT --train`` shows them. 0: none; ``rollout.record`` keeps every response with its
    tokens."""

    token_samples: NonNegativeInt = 0
    """Number of groups of a step whose responses are written token by token to ``<output>/tokens``, the first ones: log-probs
    of sampler and trainer, entropy and its change, advantage, mask, ratio, version. ``tepo report`` shows them. About 20 bytes
    a token; 0: none, at no cost."""

    token_samples_every: PositiveInt = 10
    """Steps between two files of ``token_samples``."""

    def records_tokens(self, step: int) -> bool:
        """Whether token values of a step are written; ``step``: steps done after it, as its row says."""
        return bool(self.token_samples) and step % self.token_samples_every == 0
