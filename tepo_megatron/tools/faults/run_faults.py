"""Signals to the processes of whole runs."""

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tepo_megatron.runtime.proc import Process
from tepo_megatron.sampler.rollout_file import Record
from tepo_megatron.tools.faults.processes import signal_all, wait_gone
from tepo_megatron.tools.faults.workshop import FaultClass, FaultOutcome, LiveRun, differences

_WITHIN_S = {"rollout": 0.3, "reward": 0.05, "score": 0.15, "update": 0.2, "save": 0.03, "sync": 0.3, "eval": 0.2}
"""Longest delays from a phase's start to the fault."""
PHASES = tuple(_WITHIN_S)
ROLES = ("engine core", "parent", "reward worker", "rank 1", "API server", "rank 0", "vLLM worker", "supervisor")
_OF_RANKS = ("rank 0", "rank 1", "reward worker")


class _LiveFaults(FaultClass):
    sends: ClassVar[signal.Signals] = signal.SIGKILL
    overrides: ClassVar[tuple[str, ...]] = ()
    cases: ClassVar[Sequence[tuple[str, str]]]  # role, phase

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        role, phase = self.cases[number % len(self.cases)]
        name = f"{self.sends.name} to {role} in {phase}"
        run = self.workshop.live_run(*self.overrides)
        run.reach(phase)
        time.sleep(rng.uniform(0, _WITHIN_S[phase]))
        roles, before = run.roles, run.pids
        if role not in roles:
            self.workshop.close()
            return FaultOutcome(name, "lost", f"the run has no process that is its {role}, but only {', '.join(roles)}")
        servers = set(roles.get("API server", ()))
        victim = rng.choice(roles[role])
        step = run.last_step + 2
        start = time.monotonic()
        os.kill(victim, self.sends)
        try:
            lost, said = run.continue_to(step, before)
        except TimeoutError as error:
            lost, said = f"{error}; the run said: {run.said()}", ""
        finally:
            if self.sends == signal.SIGSTOP and Process.start_time(victim):
                signal_all([victim], signal.SIGCONT)
        if not lost and (wrong := differences(run.out, self.workshop.reference())):
            lost = f"after {'resuming' if said else 'going on'}: {wrong}"
        if lost:
            self.workshop.close()
            return FaultOutcome(name, "lost", lost)
        seconds = time.monotonic() - start
        if not self.overrides:
            return FaultOutcome(name, "survived", said and f"ended and resumed: {said}", seconds)
        if said:
            return FaultOutcome(name, "lost", f"the job ended: {said}")
        if wait_gone([pid for role, pids in roles.items() if role in _OF_RANKS for pid in pids], 60.0):
            return FaultOutcome(name, "lost", "processes of the first ranks are left")
        same = servers == set(run.roles.get("API server", ()))
        return FaultOutcome(name, "survived", f"the servers {'stayed' if same else 'were started again'}", seconds)


class _Kills(_LiveFaults):
    name = "kills"
    title = "kill −9 of any process in any phase, live"
    cases = tuple((role, PHASES[(n + n // len(ROLES)) % len(PHASES)]) for n, role in enumerate(2 * ROLES))
    whole, quick = len(cases), 3


class _Restarts(_LiveFaults):
    name = "restarts"
    title = "kill −9 of each rank in each phase, live, with train.max_restarts: the job goes on by itself"
    overrides = ("train.max_restarts=1000",)
    cases = tuple((rank, phase) for phase in PHASES for rank in ("rank 0", "rank 1"))
    whole, quick = len(cases), 1


class _TeacherKills(FaultClass):
    """Bits depend on which responses a server scores at once, so they are not compared."""

    name = "teachers"
    title = "kill −9 of a served teacher's processes in any phase, live: every response is judged (bits are not compared)"
    whole, quick = len(PHASES), 1
    settings: ClassVar[tuple[str, ...]] = (
        "teachers.judge={path: 'builtin:tiny', place: server}",
        "teachers.judge.server={max_restarts: 1000, start_timeout_s: 1800, extra_args: ['--num-gpu-blocks-override=256']}",
        "objective.distill.coefficient=0.5",
    )

    def inject(self, number: int, rng: random.Random) -> FaultOutcome:
        phase, run = PHASES[number % len(PHASES)], LiveRun(self.new_folder(number), 5, self.settings)
        try:
            run.start()
            run.wait_for_row(1)
            run.reach(phase)
            time.sleep(rng.uniform(0, _WITHIN_S[phase]))
            victim = rng.choice([pid for pid in run.pids if "teacher-judge" in Process.output_path(pid)])
            step, start = run.last_step + 2, time.monotonic()
            name = f"SIGKILL to {Path(Process.command_line(victim).split()[0]).name} of the teacher in {phase}"
            os.kill(victim, signal.SIGKILL)
            lost, message = run.continue_to(step)
            seconds = time.monotonic() - start
            lost = lost or (message and f"the run ended: {message}") or ("" if run.wait_end() == 0 else run.said())
            records = [Record.read(run.out / "rollouts", index).rollouts for index in range(run.steps)] if not lost else []
            unjudged = sum(rollout.teacher_logprobs is None for record in records for rollout in record)
            lost = lost or (unjudged and f"{unjudged} responses were not judged") or ""
        except (TimeoutError, ValueError, RuntimeError) as error:
            return FaultOutcome(f"SIGKILL to the teacher in {phase}", "lost", f"{error}; the run said: {run.said()}")
        finally:
            run.stop()
        return FaultOutcome(name, "lost" if lost else "survived", lost, None if lost else seconds)


class _Hangs(_LiveFaults):
    name = "hangs"
    title = "SIGSTOP of engine core, vLLM worker, rank, reward worker, live"
    sends = signal.SIGSTOP
    cases = (
        *(("reward worker", "reward"), ("engine core", "rollout"), ("vLLM worker", "sync"), ("rank 1", "update")),
        *(("vLLM worker", "rollout"), ("engine core", "sync"), ("rank 1", "score"), ("reward worker", "rollout")),
    )
    whole, quick = len(cases), 1


LIVE: tuple[type[_LiveFaults], ...] = (_Kills, _Hangs, _Restarts)
SERVED: tuple[type[FaultClass], ...] = (_TeacherKills,)
