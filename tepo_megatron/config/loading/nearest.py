"""The field that was meant by a key that no section knows."""

from __future__ import annotations

import difflib

from tepo_megatron.config.loading.schema import Place, schema_rows

_BY_OTHER_NAMES = {
    "batch_size": ("rollout.prompts_per_step",),
    "train_batch_size": ("rollout.prompts_per_step",),
    "num_generations": ("rollout.samples_per_prompt",),
    "group_size": ("rollout.samples_per_prompt",),
    "n": ("rollout.samples_per_prompt", "evaluate.samples"),
    "learning_rate": ("optimizer.lr",),
    "max_steps": ("train.steps",),
    "epochs": ("train.steps",),
    "num_train_epochs": ("train.steps",),
    "max_tokens": ("rollout.sampling.max_new_tokens",),
    "max_completion_length": ("rollout.sampling.max_new_tokens",),
    "max_prompt_length": ("data.max_prompt_tokens",),
    "beta": ("objective.kl.coefficient",),
    "kl_coef": ("objective.kl.coefficient",),
    "clip_range": ("objective.trust_region.low", "objective.trust_region.high"),
    "algorithm": ("objective.preset",),
    "reward_fn": ("reward.verifier",),
    "reward_function": ("reward.verifier",),
    "save_steps": ("train.save_every",),
    "eval_steps": ("evaluate.every",),
    "output_dir": ("output",),
    "dataset": ("data.train",),
    "train_files": ("data.train",),
    "gradient_clipping": ("optimizer.clip_grad",),
    "max_grad_norm": ("optimizer.clip_grad",),
}
"""What other trainers call a field, where the nearest spelling would not find it."""


def nearest_fields(place: Place) -> list[str]:
    """The known fields that a key may be meant for: a slip of the fingers in its section, the same key in another one, what
    another trainer calls so, or the nearest spelling anywhere. At most three.
    """
    parent, _, key = place.path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    close = [f"{prefix}{name}" for name in difflib.get_close_matches(key, place.siblings, n=1, cutoff=0.75)]
    paths = list(dict.fromkeys(row.path for row in schema_rows() if ".NAME." not in row.path))
    same = [path for path in paths if path.rpartition(".")[2] == key]
    found = close or [*same, *_BY_OTHER_NAMES.get(key, ())]
    if not found:
        found = [f"{prefix}{name}" for name in difflib.get_close_matches(key, place.siblings, n=1, cutoff=0.5)]
    if not found:
        last = {path.rpartition(".")[2] for path in paths}
        near = difflib.get_close_matches(key, sorted(last), n=1, cutoff=0.75)
        found = [path for path in paths if path.rpartition(".")[2] in near]
    return list(dict.fromkeys(found))[:3]
