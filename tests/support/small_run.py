"""The settings of a run that is over in seconds: two small steps, with an evaluation before and after."""

SMALL_RUN = (
    "train.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "train.minibatches=2",
    "evaluate.every=2",
)
