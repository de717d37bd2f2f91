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
    ``tepo-megatron[wandb]``. The key is read from where ``wandb login`` or WANDB_API_KEY puts it; it is no setting.
    """

    project: Annotated[str, Field(min_length=1, max_length=128)]
    """The project of W&B that the run belongs to."""

    entity: Name | None = None
    """The user or team that owns the project. null: the one that W&B takes for the key."""

    name: Name | None = None
    """What W&B calls the run. null: the run's ``name``."""

    group: Name | None = None
    """The group under which W&B shows the run, such as the seeds of one setting. null: none."""

    tags: tuple[Tag, ...] = ()
    """Words to find the run by."""

    mode: Literal["online", "offline"] = "online"
    """``offline``: nothing leaves the machine; the run is in ``OUT/wandb``, and ``wandb sync`` sends it later. ``online``: it
    is sent while it goes on; where W&B is not reached until the end, it is written as an offline run then."""

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
    """The experiment of MLflow that the run belongs to; it is made where it is not there."""

    run_name: Name | None = None
    """What MLflow calls the run. null: the run's ``name``."""

    tracking_uri: str | None = None
    """Where MLflow keeps runs: the address of a tracking server, or a database such as ``sqlite:////shared/mlflow.db``. null:
    what MLFLOW_TRACKING_URI says, else the run's own ``OUT/mlflow/mlflow.db``, which needs no network. No place for a
    password."""

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
