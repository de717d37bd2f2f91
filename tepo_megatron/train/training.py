"""A training run, as torchrun starts it on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings

from tepo_megatron.config import RunConfig
from tepo_megatron.engine.checkpoint_folder import newest
from tepo_megatron.torchrun import report_before_leaving
from tepo_megatron.train.driver import Driver, NonRootDriver
from tepo_megatron.train.inputs import check_model, read_inputs
from tepo_megatron.train.loop import Loop
from tepo_megatron.train.output import Output
from tepo_megatron.train.placement import takes_turns
from tepo_megatron.train.progress import make_progress
from tepo_megatron.train.root_driver import RootDriver
from tepo_megatron.train.step_rewards import ready_pool
from tepo_megatron.train.weights import WeightPublisher


def train_model(config: RunConfig) -> None:
    """Trains to ``config.train.steps``, and leaves checkpoint, exported model, metrics and picture in ``config.output``.

    Every rank of the torchrun world calls (or one process, for a world of 1). Raises ValueError for what the user can mend,
    before servers and model are made wherever that is possible; on any way out, servers and workers are ended.
    """
    is_root = int(os.environ.get("RANK", 0)) == 0
    _end_non_root_ranks_promptly(is_root)
    model_dir = check_model(config)
    # Unwound in reverse: the engine leaves its groups first, then servers and verifiers end, and the files are closed last.
    with contextlib.ExitStack() as stack:
        output: Output | None = None
        driver: Driver = NonRootDriver()
        if is_root:
            inputs = read_inputs(config, model_dir)
            pool = ready_pool(config, inputs.train)  # before anything is written
            stack.callback(pool.close)
            output = Output(config, make_progress(config.log))
            stack.callback(output.close)
            for source, count in inputs.left_out.items():
                output.message(f"{source}: {count} problems left out, longer than data.max_prompt_tokens")
            if pool.notice is not None:
                output.message(pool.notice)
            driver = RootDriver(config, inputs, output, pool)
            stack.callback(driver.close)
        _silence_upstream()
        # Megatron-Core takes seconds to import; the servers are coming up meanwhile.
        from tepo_megatron.engine.engine import Engine

        engine = Engine(config, model_dir, shares_gpus=takes_turns(config))
        stack.callback(engine.close)
        stack.push(report_before_leaving)
        fleet = driver.fleet if isinstance(driver, RootDriver) else None
        loop = Loop(config, engine, driver, WeightPublisher(config, engine, fleet))
        if config.train.resume:
            _resume(loop, driver, output)
        loop.run()
        engine.export(config.output / "model")
        if output is not None:
            output.finish()


def _resume(loop: Loop, driver: Driver, output: Output | None) -> None:
    found = newest(loop.config.output / "checkpoints")
    state = loop.engine.load(found)
    loop.step = state["step"]
    if isinstance(driver, RootDriver) and output is not None:
        driver.restore(state)
        output.resume_from(loop.step)
        output.message(f"resumed from {found} at step {loop.step}")


def _silence_upstream() -> None:
    """Hides warnings of Megatron and torch that no user of this package can act on (missing apex, renamed collectives)."""
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger", r"torch\.distributed\.distributed_c10d"):
        warnings.filterwarnings("ignore", module=module)


def _end_non_root_ranks_promptly(is_root: bool) -> None:
    """Rank 0 unwinds on a signal, so that servers end (``torchrun.run_rank`` sees to it). The others have nothing to end,
    and waiting in a collective would keep them from noticing.
    """
    if not is_root:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
