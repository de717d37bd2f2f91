"""Checks of a run's configuration over several sections: what it trains on and is examined in, and its rewards.

Each raises ValueError, a sentence that says what to change.
"""

from tepo_megatron.config.data import is_own, show_paths
from tepo_megatron.config.objective.choices import GDPOAdvantage
from tepo_megatron.config.sections import RunSections


def no_demonstration_beside_own_problems(run: RunSections) -> None:
    train, heldout = run.data.train, run.data.heldout
    if heldout is None and run.evaluate.every and not run.evaluate.sets:
        raise ValueError(
            f"evaluate.every = {run.evaluate.every}, but there are no held-out problems; give data.heldout or "
            "evaluate.sets, or set evaluate.every = 0"
        )
    if heldout is not None and is_own(train) != is_own(heldout):
        raise ValueError(
            f"data.train = {show_paths(train)} with data.heldout = {show_paths(heldout)}: one is your own, the other "
            "the demonstration's, and a model is "
            "examined in what it is trained in; give both, or data.heldout = null to evaluate nothing"
        )


def a_group_can_be_compared(run: RunSections) -> None:
    if run.rollout.samples_per_prompt == 1:
        raise ValueError(
            "rollout.samples_per_prompt = 1: an advantage compares the responses to one prompt, and that of a single one "
            "is 0, so that nothing would be learnt; set 2 or more, 8 is usual"
        )


def best_is_measured(run: RunSections) -> None:
    best = run.train.keep_best
    if best is not None and best.metric.startswith("eval/"):
        name = best.metric.split("/")[1]
        if name not in run.evaluate.sets or not run.evaluate.every_of(name):
            raise ValueError(
                f"train.keep_best.metric = {best.metric} is measured on evaluate.sets.{name}, which "
                f"{'is never evaluated; set its every' if name in run.evaluate.sets else 'is not given'}"
            )
    heldout = best is not None and best.metric.startswith(("accuracy/", "heldout/"))
    if heldout and best is not None and run.data.heldout is None:
        raise ValueError(
            f"train.keep_best.metric = {best.metric} is measured on data.heldout, which is not given; give it, or another "
            "metric"
        )
    if heldout and best is not None and not run.evaluate.every:
        raise ValueError(
            f"train.keep_best.metric = {best.metric} is measured by evaluations, but evaluate.every = 0 makes none; set "
            "evaluate.every, or another metric"
        )


def tokens_are_recorded(run: RunSections) -> None:
    log = run.log
    if log.token_samples and log.token_samples_every > run.train.steps:
        raise ValueError(
            f"log.token_samples_every = {log.token_samples_every} is more than train.steps = {run.train.steps}: token values "
            f"of no step would be written; set it to {run.train.steps} or less"
        )


def rewards_are_weighed(run: RunSections) -> None:
    """GDPO weighs normalised components, a plain reward raw ones: neither set of weights stands in for the other."""
    advantage, weights = run.objective.advantage, run.reward.weights
    if not isinstance(advantage, GDPOAdvantage):
        return
    other = next((source.called for source in run.data.train_sources if source.verifier is not None), None)
    if other is not None:
        raise ValueError(
            f"objective.advantage.kind = gdpo weighs the components that one verifier returns, and the source {other} of "
            "data.train has a verifier of its own; set another advantage, or reward.verifier for all sources"
        )
    if advantage.weights is None:
        if weights is not None and len(set(weights.values())) > 1:
            given = ", ".join(f"{each:g}" for each in weights.values())
            raise ValueError(
                "reward.weights differ, but objective.advantage.kind = gdpo without weights weighs all components the "
                f"same; set objective.advantage.weights=[{given}], in this order, or reward.weights to 1 each"
            )
    elif weights is None:
        raise ValueError(
            f"objective.advantage.weights names {len(advantage.weights)} rewards, but a run has one for each response "
            "unless reward.weights names the components that reward.verifier returns; set that, or leave "
            "objective.advantage.weights out"
        )
    elif len(weights) != len(advantage.weights):
        raise ValueError(
            f"objective.advantage.weights has {len(advantage.weights)} entries, but reward.weights names {len(weights)} "
            f"components: {', '.join(weights)}; give one for each, in this order"
        )


def punishment_is_felt(run: RunSections) -> None:
    advantage = run.objective.advantage.kind
    if run.rollout.truncated == "penalise" and advantage == "gdpo":
        raise ValueError(
            "rollout.truncated = penalise lowers the reward, and objective.advantage.kind = gdpo takes the components "
            "of it instead; give the length a component of its own, or set rollout.truncated = mask"
        )
    if run.rollout.truncated == "penalise" and advantage == "divide_by_mean":
        raise ValueError(
            "rollout.truncated = penalise makes rewards negative, and objective.advantage.kind = divide_by_mean divides by "
            "their mean; set rollout.truncated = mask, or another advantage"
        )


def programs_are_run_knowingly(run: RunSections) -> None:
    """Of environments ``EnvironmentConfig`` asks the same."""
    given = {"reward.verifier": run.reward.verifier}
    given |= {f"evaluate.sets.{name}.verifier": each.verifier or "" for name, each in run.evaluate.sets.items()}
    given |= {f"the verifier of the source {each.called}": each.verifier or "" for each in run.data.train_sources}
    given |= {f"the verifier of the source {each.called}": each.verifier or "" for each in run.data.heldout_sources}
    field = next((field for field, verifier in given.items() if verifier == "python_tests"), None)
    if field is None:
        return
    if not run.reward.run_code:
        raise ValueError(
            f"{field} = python_tests runs programs that the model writes; set reward.run_code = true if you mean it"
        )
    if run.reward.network:
        raise ValueError(f"{field} = python_tests has no network; leave reward.network out")


CHECKS = (
    no_demonstration_beside_own_problems,
    a_group_can_be_compared,
    best_is_measured,
    tokens_are_recorded,
    rewards_are_weighed,
    punishment_is_felt,
    programs_are_run_knowingly,
)
"""In the order in which they are made."""
