"""What the model cannot do is refused before anything is started, by the functions that the plan asks too."""

from __future__ import annotations

import pytest

from tepo_megatron.config.load import load_run
from tepo_megatron.run.checks import check_model


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.parallel.pp=3"], r"engine.parallel.pp = 3 does not divide the model's 4 layers"),
        (
            ["engine.parallel.pp=2", "engine.parallel.num_layers_in_first_pipeline_stage=5"],
            r"num_layers_in_first_pipeline_stage = 5: 4 layers do not split over 2 pipeline stages",
        ),
        (
            ["engine.recompute=selective", "engine.recompute_modules=[moe]"],
            r"recompute_modules has moe, which is for models with experts",
        ),
        (["rollout.server.max_model_len=100000"], r"max_model_len = 100000 tokens are more than the 256 positions"),
    ],
)
def test_it_is_refused_with_what_to_change(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_model(load_run(None, overrides))
