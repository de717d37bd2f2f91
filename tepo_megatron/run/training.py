import contextlib
import signal
import warnings
from functools import partial
from pathlib import Path

import torch

from tepo_megatron.config import RunConfig
from tepo_megatron.errors import describe
from tepo_megatron.run.callbacks import NO_EXTENSIONS, Callbacks, Extensions, RunInfo
from tepo_megatron.run.checks import RunSubject, check_model
from tepo_megatron.run.display.progress import Progress
from tepo_megatron.run.loop import Loop
from tepo_megatron.run.metrics import read_metrics
from tepo_megatron.run.output.output import Output
from tepo_megatron.run.output.resume import Resumed, resolve_dtype, resumes
from tepo_megatron.run.rank0 import Rank0
from tepo_megatron.run.sampling.collector import RolloutCollector
from tepo_megatron.run.sampling.custom_rollout import load_collect
from tepo_megatron.run.sampling.inputs import Inputs
from tepo_megatron.run.step.placement import Placement
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.runtime.heartbeat import Heartbeat
from tepo_megatron.runtime.machine import available_cores, is_root, this_machine, variable
from tepo_megatron.runtime.preemption import StopRequested, StopSignals, not_ignored
from tepo_megatron.runtime.rank import report_before_leaving
from tepo_megatron.runtime.restarts import starts_again
from tepo_megatron.tasks.environments.environment_task import open_task
from tepo_megatron.tasks.evaluate.evaluation import verifier_pools
from tepo_megatron.trainer.checkpoint_folder import checkpoint_name
from tepo_megatron.trainer.protocol import Trainer, trainer_kind


def train_model(config: RunConfig, extensions: Extensions = NO_EXTENSIONS) -> None:
    """Trains to ``config.train.steps``, or until a callback ends the run. ``extensions`` are rank 0's.

    Every rank of the torchrun world calls, or one process for a world of 1. Raises ValueError for what the user can correct, if
    possible before servers and model start; StopRequested after a signal, once the training so far is saved.
    """
    signals = StopSignals.current()
    trainer_kind().prepare_process(config)  # before the servers' side or the trainer look for GPUs
    if threads := Placement(config, this_machine()).trainer_threads(available_cores()):
        torch.set_num_threads(threads)
    if not is_root():
        # Before the loop only rank 0 unwinds on a signal, to end servers; the others would not notice it in a collective.
        for number in not_ignored():
            signal.signal(number, signal.SIG_DFL)
    config = resolve_dtype(config, this_machine().gpus)
    model_dir = check_model(config)
    # Unwound in reverse: the engine leaves its groups first, then servers and verifiers end, and the files are closed last.
    with contextlib.ExitStack() as stack:
        try:
            loop = open_loop(config, model_dir, extensions, stack)
        except StopRequested as stop:
            signals.say_last(f"{stop}: ended before the first step")
            raise
        signals.defer()
        loop.run()
        _raise_failure(loop)
        loop.engine.weights.export_adapters(config.output / "adapter")
        loop.engine.weights.export(config.output / "model")  # last: a sweep takes a run with it for done
        if loop.rank0 is not None:
            loop.rank0.callbacks.tell("on_run_end", loop.step, loop.step)
            loop.rank0.output.finish()
        _raise_failure(loop, complete=config.output)


def open_loop(config: RunConfig, model_dir: Path, extensions: Extensions, stack: contextlib.ExitStack) -> Loop:
    """``stack`` closes what it opens. Every rank calls."""
    rank, world_size, timeout_s = variable("RANK", 0), variable("WORLD_SIZE", 1), config.train.hang_timeout_s
    heartbeat = Heartbeat(config.output / "status", rank, world_size, hang_timeout_s=timeout_s, limits=phase_limits(config))
    stack.push(partial(_note_ending, heartbeat))
    rank0 = _open_rank0(config, model_dir, extensions, heartbeat, stack) if is_root() else None
    # Warnings of Megatron and torch that no user of this package can act on (missing apex, renamed collectives).
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger", r"torch\.distributed\.distributed_c10d"):
        warnings.filterwarnings("ignore", module=module)
    # Megatron-Core takes seconds to import; the servers start meanwhile.
    teachers, shares_gpus = RunSubject(config, this_machine()).folders_of_teachers("ranks"), config.is_colocated
    engine = trainer_kind().make_trainer(config, model_dir, teachers=teachers, shares_gpus=shares_gpus, heartbeat=heartbeat)
    stack.push(partial(_close, engine))
    stack.push(report_before_leaving)
    sampler = None if rank0 is None else rank0.servers.sampler
    loop = Loop(config, engine, rank0, WeightPublisher(config, engine.weights, sampler), heartbeat)
    # Ranks may see a shared disk differently: rank 0 has looked.
    if engine.broadcast_from_root(rank0 is not None and rank0.output.resumes):
        _resume(loop, model_dir)
    if rank0 is not None and (callbacks := rank0.callbacks).callbacks:
        folder = config.output / "checkpoints"
        loop.stopping.on_saved = lambda step: callbacks.tell("on_checkpoint", step, step, folder / checkpoint_name(step))
        restarted = starts_again() and Resumed.is_of_this_job(folder / checkpoint_name(loop.step))
        callbacks.begin(RunInfo(config, loop.step, read_metrics(config.output / "metrics.jsonl"), restarted))
    return loop


def _open_rank0(
    config: RunConfig, model_dir: Path, extensions: Extensions, heartbeat: Heartbeat, stack: contextlib.ExitStack
) -> Rank0:
    inputs = Inputs.read(config, model_dir, has_reward=extensions.reward is not None)
    if resumes(config):
        RolloutCollector.changed_order(Resumed.find(config, model_dir).state, inputs.order, config)
    callbacks = Callbacks.of(config, extensions.callbacks)
    collect = load_collect(config, extensions.collect)
    task = open_task(config, inputs.tokenizer, inputs.spec, extensions.reward)  # before anything is written
    stack.callback(task.close)
    scored = (inputs.heldout, inputs.train) if config.rollout.replay is None else ()
    pools = stack.enter_context(verifier_pools(config, inputs.sets, task, *scored))
    signals = StopSignals.current()
    with signals.postponed():  # or nothing would release the folder's lock
        output = Output(config, Progress.of(config.log))
        stack.callback(output.close)
        signals.say = callbacks.say = output.message
        heartbeat.start()
    for notice in (*inputs.left_out, *([] if task.notice is None else [task.notice])):
        output.message(notice)
    rank0 = Rank0(config, inputs, output, heartbeat, task, pools, callbacks, collect)
    stack.callback(rank0.close)
    return rank0


def _note_ending(heartbeat: Heartbeat, _kind: object, error: BaseException | None, _traceback: object) -> None:
    if error is None:
        heartbeat.close("finished")
    else:
        heartbeat.close("interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {describe(error)}")


def _close(engine: Trainer, kind: type[BaseException] | None, *_error: object) -> None:
    failed = kind is not None and not issubclass(kind, StopRequested)
    # Closing NCCL's groups waits for ranks that wait for this one. After an error ``run_rank`` ends the process instead.
    if not (failed and torch.cuda.is_available() and variable("WORLD_SIZE", 1) > 1):
        engine.close()


def _raise_failure(loop: Loop, *, complete: Path | None = None) -> None:
    if loop.rank0 is not None:
        loop.rank0.callbacks.raise_failure(saved_step=loop.stopping.saved_step, complete=complete)


def _resume(loop: Loop, model_dir: Path) -> None:
    checkpoint = Resumed.load(loop.config, loop.engine, model_dir)
    loop.step = loop.stopping.saved_step = checkpoint.step
    loop.rollback.restore(checkpoint.state.get("rollback", {}))
    rank0 = loop.rank0
    if rank0 is not None:
        rank0.lost["lost/resume"] += rank0.resume_from(loop.step)
        restarted = rank0.restore(checkpoint.state)
        for sentence in [*checkpoint.messages(loop.config, restarted), *checkpoint.accept(loop.config)]:
            rank0.output.message(sentence)


def phase_limits(config: RunConfig) -> dict[str, float]:
    """Seconds without progress that a phase's own time-outs allow. While servers sample, every token is progress."""
    server, reward = config.rollout.server, config.reward
    servers = server.longest_wait_s
    responses = config.rollout.responses_per_step
    verdicts = responses * reward.timeout_s / reward.workers
    silent = server.request_timeout_s + (0.0 if config.environment is None else config.environment.call_limit_s)
    served = [teacher.served.longest_wait_s for teacher in config.teachers.values() if teacher.place == "server"]
    verdicts += max(served, default=0.0)  # which come with them
    inside = config.train.schedule == "overlap" or config.rollout.collect is not None
    rollout = silent + (verdicts if inside else 0.0)
    return {"servers": servers, "rollout": rollout, "sync": servers, "reward": verdicts, "eval": silent + verdicts}
