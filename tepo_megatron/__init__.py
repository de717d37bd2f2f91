"""TEPO (Token-Level Policy Optimization) on Megatron-Core, with vLLM rollouts.

Only the names of ``__all__`` are public (docs/api). Each is imported on first use, so ``import tepo_megatron`` is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # in this form a name is exported for type checkers; at run time __getattr__ imports it
    from tepo_megatron.config import ObjectiveConfig as ObjectiveConfig
    from tepo_megatron.config import RunConfig as RunConfig
    from tepo_megatron.config.load import ConfigError as ConfigError
    from tepo_megatron.config.load import dump_resolved as dump_resolved
    from tepo_megatron.config.load import load_run as load_run
    from tepo_megatron.config.objective.custom import OwnAdvantage as OwnAdvantage
    from tepo_megatron.config.objective.custom import OwnAggregation as OwnAggregation
    from tepo_megatron.config.objective.custom import OwnMask as OwnMask
    from tepo_megatron.config.objective.custom import OwnMismatch as OwnMismatch
    from tepo_megatron.config.objective.custom import OwnPenalty as OwnPenalty
    from tepo_megatron.config.objective.custom import OwnRatio as OwnRatio
    from tepo_megatron.config.objective.custom import OwnTrustRegion as OwnTrustRegion
    from tepo_megatron.core.objective.checking import check_objective as check_objective
    from tepo_megatron.core.objective.compose import Objective as Objective
    from tepo_megatron.core.objective.compose import StepContext as StepContext
    from tepo_megatron.core.objective.compose import build_objective as build_objective
    from tepo_megatron.core.objective.trust_region import Surrogate as Surrogate
    from tepo_megatron.core.objective.values import StepValues as StepValues
    from tepo_megatron.core.objective.values import TokenValues as TokenValues
    from tepo_megatron.core.problem import Problem as Problem
    from tepo_megatron.core.problem import ResponseText as ResponseText
    from tepo_megatron.core.rollout import Rollout as Rollout
    from tepo_megatron.core.scores import fused_linear_logprob_and_entropy as fused_linear_logprob_and_entropy
    from tepo_megatron.core.scores import logprob_and_entropy as logprob_and_entropy
    from tepo_megatron.core.types import Batch as Batch
    from tepo_megatron.core.types import Divergence as Divergence
    from tepo_megatron.core.types import ObjectiveOutput as ObjectiveOutput
    from tepo_megatron.core.types import TeacherHead as TeacherHead
    from tepo_megatron.core.types import TeacherLogits as TeacherLogits
    from tepo_megatron.core.types import TeacherTopK as TeacherTopK
    from tepo_megatron.core.types import TokenScores as TokenScores
    from tepo_megatron.plan import Plan as Plan
    from tepo_megatron.plan import check_plan as check_plan
    from tepo_megatron.plan import make_plan as make_plan
    from tepo_megatron.run.api import TrainResult as TrainResult
    from tepo_megatron.run.api import train as train
    from tepo_megatron.run.callbacks import Callback as Callback
    from tepo_megatron.run.callbacks import EarlyStopping as EarlyStopping
    from tepo_megatron.run.callbacks import RunInfo as RunInfo
    from tepo_megatron.run.callbacks import Stop as Stop
    from tepo_megatron.run.sampling.custom_rollout import StepSampler as StepSampler
    from tepo_megatron.run.training import train_model as train_model
    from tepo_megatron.tasks.environments.protocol import StepResult as StepResult
    from tepo_megatron.tasks.evaluate.evaluation import EvaluationResult as EvaluationResult
    from tepo_megatron.tasks.evaluate.standalone import evaluate_model as evaluate_model
    from tepo_megatron.tasks.reward.judge import Judge as Judge
    from tepo_megatron.weights.architecture import ModelSpec as ModelSpec
    from tepo_megatron.weights.architecture import read_model_spec as read_model_spec
    from tepo_megatron.weights.geometry import ReshardPlan as ReshardPlan
    from tepo_megatron.weights.layouts import MegatronParallel as MegatronParallel
    from tepo_megatron.weights.layouts import VllmParallel as VllmParallel
    from tepo_megatron.weights.reshard import reshard_plan as reshard_plan
    from tepo_megatron.weights.storage.convert import export_model as export_model
    from tepo_megatron.weights.storage.convert import import_model as import_model

__version__ = "0.1.0"

_NAMES = {
    "config": "ObjectiveConfig RunConfig",
    "config.load": "ConfigError dump_resolved load_run",
    "config.objective.custom": "OwnAdvantage OwnAggregation OwnMask OwnMismatch OwnPenalty OwnRatio OwnTrustRegion",
    "core.objective.checking": "check_objective",
    "core.objective.compose": "Objective StepContext build_objective",
    "core.objective.trust_region": "Surrogate",
    "core.objective.values": "StepValues TokenValues",
    "core.problem": "Problem ResponseText",
    "core.rollout": "Rollout",
    "core.scores": "fused_linear_logprob_and_entropy logprob_and_entropy",
    "core.types": "Batch Divergence ObjectiveOutput TeacherHead TeacherLogits TeacherTopK TokenScores",
    "plan": "Plan check_plan make_plan",
    "run.api": "TrainResult train",
    "run.callbacks": "Callback EarlyStopping RunInfo Stop",
    "run.sampling.custom_rollout": "StepSampler",
    "run.training": "train_model",
    "tasks.environments.protocol": "StepResult",
    "tasks.evaluate.evaluation": "EvaluationResult",
    "tasks.evaluate.standalone": "evaluate_model",
    "tasks.reward.judge": "Judge",
    "weights.architecture": "ModelSpec read_model_spec",
    "weights.geometry": "ReshardPlan",
    "weights.layouts": "MegatronParallel VllmParallel",
    "weights.reshard": "reshard_plan",
    "weights.storage.convert": "export_model import_model",
}  # module → its public names
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "__version__"])

if not TYPE_CHECKING:  # a type checker must refuse names that are not there

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
