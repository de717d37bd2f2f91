"""TEPO (Token-Level Policy Optimization) on Megatron-Core, with vLLM rollouts.

The names of ``__all__`` are the public ones (docs/api); everything else may change with any version. Each is imported from its
home when it is asked for, so ``import tepo_megatron`` is instant, and needs neither torch nor pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tepo_megatron.config import (
        ObjectiveConfig,
        OwnAdvantage,
        OwnAggregation,
        OwnMask,
        OwnMismatch,
        OwnPenalty,
        OwnRatio,
        OwnTrustRegion,
        RunConfig,
    )
    from tepo_megatron.config.loading.load import ConfigError, dump_resolved, load_run
    from tepo_megatron.core.objective import (
        Objective,
        StepContext,
        StepValues,
        Surrogate,
        TokenValues,
        build_objective,
        check_objective,
    )
    from tepo_megatron.core.problem import Problem, ResponseText
    from tepo_megatron.core.rollout import Rollout
    from tepo_megatron.core.scores import fused_linear_logprob_and_entropy, logprob_and_entropy
    from tepo_megatron.core.types import Batch, ObjectiveOutput, TokenScores
    from tepo_megatron.plan import Plan, check_plan, make_plan
    from tepo_megatron.run.api import train
    from tepo_megatron.run.callbacks.callbacks import Callback
    from tepo_megatron.run.callbacks.early_stopping import EarlyStopping
    from tepo_megatron.run.callbacks.stop import RunInfo, Stop
    from tepo_megatron.run.output.result import TrainResult
    from tepo_megatron.run.sampling.custom_rollout import StepSampler
    from tepo_megatron.run.training import train_model
    from tepo_megatron.tasks.environments.protocol import StepResult
    from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult
    from tepo_megatron.tasks.evaluate.standalone import evaluate_model
    from tepo_megatron.tasks.reward.judge import Judge
    from tepo_megatron.weights.architecture import ModelSpec, read_model_spec
    from tepo_megatron.weights.geometry import ReshardPlan
    from tepo_megatron.weights.layouts import MegatronParallel, VllmParallel
    from tepo_megatron.weights.reshard.plan import reshard_plan
    from tepo_megatron.weights.storage.convert import export_model, import_model

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Callback",
    "ConfigError",
    "EarlyStopping",
    "EvaluationResult",
    "Judge",
    "MegatronParallel",
    "ModelSpec",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveOutput",
    "OwnAdvantage",
    "OwnAggregation",
    "OwnMask",
    "OwnMismatch",
    "OwnPenalty",
    "OwnRatio",
    "OwnTrustRegion",
    "Plan",
    "Problem",
    "ReshardPlan",
    "ResponseText",
    "Rollout",
    "RunConfig",
    "RunInfo",
    "StepContext",
    "StepResult",
    "StepSampler",
    "StepValues",
    "Stop",
    "Surrogate",
    "TokenScores",
    "TokenValues",
    "TrainResult",
    "VllmParallel",
    "__version__",
    "build_objective",
    "check_objective",
    "check_plan",
    "dump_resolved",
    "evaluate_model",
    "export_model",
    "fused_linear_logprob_and_entropy",
    "import_model",
    "load_run",
    "logprob_and_entropy",
    "make_plan",
    "read_model_spec",
    "reshard_plan",
    "train",
    "train_model",
]

_HOMES = {
    "Batch": "core.types",
    "Callback": "run.callbacks.callbacks",
    "ConfigError": "config.loading.load",
    "EarlyStopping": "run.callbacks.early_stopping",
    "EvaluationResult": "tasks.evaluate.evaluation",
    "Judge": "tasks.reward.judge",
    "MegatronParallel": "weights.layouts",
    "ModelSpec": "weights.architecture",
    "Objective": "core.objective",
    "ObjectiveConfig": "config",
    "ObjectiveOutput": "core.types",
    "OwnAdvantage": "config",
    "OwnAggregation": "config",
    "OwnMask": "config",
    "OwnMismatch": "config",
    "OwnPenalty": "config",
    "OwnRatio": "config",
    "OwnTrustRegion": "config",
    "Plan": "plan",
    "Problem": "core.problem",
    "ReshardPlan": "weights.geometry",
    "ResponseText": "core.problem",
    "Rollout": "core.rollout",
    "RunConfig": "config",
    "RunInfo": "run.callbacks.stop",
    "StepContext": "core.objective",
    "StepResult": "tasks.environments.protocol",
    "StepSampler": "run.sampling.custom_rollout",
    "StepValues": "core.objective",
    "Stop": "run.callbacks.stop",
    "Surrogate": "core.objective",
    "TokenScores": "core.types",
    "TokenValues": "core.objective",
    "TrainResult": "run.output.result",
    "VllmParallel": "weights.layouts",
    "build_objective": "core.objective",
    "check_objective": "core.objective",
    "check_plan": "plan",
    "dump_resolved": "config.loading.load",
    "evaluate_model": "tasks.evaluate.standalone",
    "export_model": "weights.storage.convert",
    "fused_linear_logprob_and_entropy": "core.scores",
    "import_model": "weights.storage.convert",
    "load_run": "config.loading.load",
    "logprob_and_entropy": "core.scores",
    "make_plan": "plan",
    "read_model_spec": "weights.architecture",
    "reshard_plan": "weights.reshard.plan",
    "train": "run.api",
    "train_model": "run.training",
}
"""Public name → the module, below this one, that the imports above name."""

if not TYPE_CHECKING:  # a type checker must refuse names that are not there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
