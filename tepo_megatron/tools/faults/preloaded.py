"""What a rank imports: the server imports it that forks replayed runs."""

import gc
import importlib
import warnings

gc.disable()  # a collection walks a million objects
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's, of what is not installed here
    for _name in (
        *("tepo_megatron.cli.train", "tepo_megatron.run.training", "tepo_megatron.trainer.megatron.engine"),
        *("torch._dynamo", "torch.onnx"),  # at the first optimizer step
    ):
        importlib.import_module(_name)
gc.collect()
gc.freeze()  # a rank would copy their pages
gc.enable()
