"""A training run, as torchrun starts it on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path

from tepo_megatron.config import RunConfig
from tepo_megatron.run.callbacks.callbacks import Callbacks, RunInfo, make_callbacks
from tepo_megatron.run.checks import check_model
from tepo_megatron.run.display.progress import make_progress
from tepo_megatron.run.loop import Loop
from tepo_megatron.run.metrics.metrics import read_metrics
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.resume import accept, messages, resume
from tepo_megatron.run.python_args import NO_EXTENSIONS, Extensions
from tepo_megatron.run.rank0 import Rank0
from tepo_megatron.run.sampling.custom_rollout import load_collect
from tepo_megatron.run.sampling.inputs import read_inputs
from tepo_megatron.run.sampling.step_rewards import rehearsed
from tepo_megatron.run.step.heartbeat_limits import make_heartbeat, told_at_the_end
from tepo_megatron.run.step.placement import set_threads, takes_turns
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.runtime.preemption import STOP_SIGNALS, stop_signals
from tepo_megatron.runtime.rank import report_before_leaving
from tepo_megatron.tasks.environments.environment_task import open_task
from tepo_megatron.tasks.evaluate.evaluation import VerifierPools
from tepo_megatron.trainer.checkpoints.folder import checkpoint_name
from tepo_megatron.trainer.registry import make_trainer, prepare_process


def train_model(config: RunConfig, extensions: Extensions = NO_EXTENSIONS) -> None:
    """Trains to ``config.train.steps``, or until a callback ends the run; leaves checkpoint, exported model, metrics and
    picture in ``config.output``. ``extensions`` are rank 0's.

    Every rank of the torchrun world calls (or one process, for a world of 1). Raises ValueError for what the user can correct,
    if possible before servers and model start; servers and workers always end. Raises StopRequested after a signal that
    ``rank.run_rank`` handles, when what was trained is saved.
    """
    signals = stop_signals()
    prepare_process(config)  # before the servers' side or the trainer look for GPUs
    set_threads(config)
    is_root = int(os.environ.get("RANK", 0)) == 0
    _end_non_root_ranks_promptly(is_root)
    model_dir = check_model(config)
    # Unwound in reverse: the engine leaves its groups first, then servers and verifiers end, and the files are closed last.
    with contextlib.ExitStack() as stack:
        output: Output | None = None
        callbacks = Callbacks(())
        heartbeat = make_heartbeat(config)
        stack.enter_context(told_at_the_end(heartbeat))
        rank0: Rank0 | None = None
        if is_root:
            inputs = read_inputs(config, model_dir, has_reward=extensions.reward is not None)
            callbacks = Callbacks(make_callbacks(config, extensions.callbacks))
            collect = load_collect(config, extensions.collect)
            task = open_task(config, inputs.tokenizer, inputs.spec, extensions.reward)  # before anything is written
            stack.callback(rehearsed(task, config, inputs.train).close)
            pools = stack.enter_context(VerifierPools(config, inputs.sets, task))
            output = Output(config, make_progress(config.log))
            stack.callback(output.close)
            signals.say = output.message
            heartbeat.start()
            for notice in inputs.left_out:
                output.message(notice)
            if task.notice is not None:
                output.message(task.notice)
            callbacks.say = output.message
            rank0 = Rank0(config, inputs, output, heartbeat, task, pools, callbacks, collect)
            stack.callback(rank0.close)
        _silence_upstream()
        # Megatron-Core takes seconds to import; the servers are coming up meanwhile.
        engine = make_trainer(config, model_dir, shares_gpus=takes_turns(config), heartbeat=heartbeat)
        stack.callback(engine.close)
        stack.push(report_before_leaving)
        sampler = None if rank0 is None else rank0.servers.sampler
        loop = Loop(config, engine, rank0, WeightPublisher(config, engine.weights, sampler), heartbeat)
        # Ranks may see a shared disk differently: rank 0 has looked.
        if engine.broadcast_from_root(output is not None and output.resumes):
            _resume(loop, model_dir)
        _begin(callbacks, loop)
        signals.defer()
        loop.run()
        callbacks.raise_failure(saved_step=loop.leaving.saved_step)
        engine.weights.export(config.output / "model")
        engine.weights.export_adapters(config.output / "adapter")
        callbacks.tell("on_run_end", loop.step, loop.step)
        if output is not None:
            output.finish()
        callbacks.raise_failure(saved_step=loop.leaving.saved_step)


def _resume(loop: Loop, model_dir: Path) -> None:
    found = resume(loop.config, loop.engine, model_dir)
    loop.step = loop.leaving.saved_step = found.step
    loop.updates_sent = found.step  # one a step, so that canaries are due when they would have been
    rank0 = loop.rank0
    if rank0 is not None:
        rank0.lost.add("lost/resume", rank0.output.resume_from(loop.step))
        rank0.restore(found.state)
        for sentence in [*messages(loop.config, found), *accept(loop.config, found)]:
            rank0.output.message(sentence)


def _begin(callbacks: Callbacks, loop: Loop) -> None:
    if callbacks.callbacks:
        output = loop.config.output
        folder = output / "checkpoints"
        loop.leaving.on_saved = lambda step: callbacks.tell("on_checkpoint", step, step, folder / checkpoint_name(step))
        callbacks.begin(RunInfo(loop.config, loop.step, read_metrics(output / "metrics.jsonl")))


def _silence_upstream() -> None:
    """Hides warnings of Megatron and torch that no user of this package can act on (missing apex, renamed collectives)."""
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger", r"torch\.distributed\.distributed_c10d"):
        warnings.filterwarnings("ignore", module=module)


def _end_non_root_ranks_promptly(is_root: bool) -> None:
    """Before the loop only rank 0 unwinds on a signal, to end servers; the others would not notice it in a collective. In the
    loop all go to the next safe point together.
    """
    if not is_root:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
