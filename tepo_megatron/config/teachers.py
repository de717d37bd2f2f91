"""``teachers``: frozen models that judge the policy's tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from tepo_megatron.config.base import Section
from tepo_megatron.config.data import DataConfig
from tepo_megatron.config.objective.section import ObjectiveConfig
from tepo_megatron.config.rollout import RolloutConfig, ServerConfig

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")


class TeacherConfig(Section):
    path: Annotated[str, Field(min_length=1)]
    """Model, as ``model.path``: any supported architecture and size, with the policy's tokenizer."""

    place: Literal["ranks", "server"] = "ranks"
    """``ranks``: split over the trainer's ranks as the policy is, and offloaded to host memory between uses on GPUs;
    ``server``: a vLLM server of its own, which scores the sampled tokens while others are drawn.
    """

    server: ServerConfig | None = None
    """``place = server`` only: as ``rollout.server``. null: one local server."""

    threads: PositiveInt = 16
    """``place = server`` only: responses scored at once."""

    @property
    def served(self) -> ServerConfig:
        # vLLM loads its weights itself
        return (self.server or ServerConfig()).model_copy(update={"transfer": "gather"})

    @property
    def local_workers(self) -> int:
        is_local = self.place == "server" and self.served.placement == "local"  # to the trainer's first machine
        return self.served.tp * self.served.count if is_local else 0

    def _faults(self) -> Iterator[str]:
        if self.place == "ranks" and self.server is not None:
            yield "server is for a teacher with place = server; set that, or leave server out"
        if self.served.placement == "colocated":
            yield "server.placement = colocated takes turns with the trainer, and a teacher scores meanwhile; set another"
        server = self.server or ServerConfig()
        for name, value in server._changed("transfer", "transport", "transfer_timeout_s", "routing_replay").items():
            yield f"server.{name} = {value} is for the policy's servers, which get its weights; leave it out"
        if self.served.load_format == "dummy":
            yield "server.load_format = dummy: no update would ever bring a teacher's weights; leave it out"
        yield from self._idle(["threads"], "place", "server")

    @staticmethod
    def faults_among(
        teachers: Mapping[str, TeacherConfig], objective: ObjectiveConfig, data: DataConfig, rollout: RolloutConfig
    ) -> Iterator[str]:
        needs = objective.needs & {"teacher", "divergence"}
        for name in teachers:
            if not _NAME.fullmatch(name):
                yield f"teachers: {name[:60]!r} cannot name a teacher: a name has letters, digits, - and _, 40 at most"
        if needs and not teachers:
            yield "the objective has a teacher, and teachers names none; set teachers.NAME.path to a model"
        if teachers and not needs:
            yield (
                f"teachers.{next(iter(teachers))} is never asked; set objective.distill or objective.preset = "
                "on_policy_distill, or leave it out"
            )
        named = {source.called: source.teacher for source in data.train_sources}
        has = f"teachers has {', '.join(teachers) or 'none'}"
        for source, teacher in named.items():
            if teacher is not None and teacher not in teachers:
                yield f"the source {source} of data.train names the teacher {teacher}; {has}"
            if teacher is None and len(teachers) > 1:
                yield f"the source {source} of data.train names no teacher, and {has}; set its teacher"
        idle = [name for name in teachers if name not in named.values()]
        if idle and len(teachers) > 1:
            yield f"teachers.{idle[0]} is named by no source of data.train; name it there, or leave it out"
        served = [name for name, teacher in teachers.items() if teacher.place == "server"]
        servers = {"rollout.server": rollout.server}
        servers |= {f"teachers.{name}.server": teachers[name].served for name in served}
        registries: dict[str, str] = {}
        for field, server in servers.items():
            other = field if server.registry is None else registries.setdefault(os.path.realpath(server.registry), field)
            if other != field:
                yield (
                    f"{field}.registry = {server.registry} is the folder of {other} too, and would mix up their servers; name "
                    "another one, such as OUT/teacher-servers"
                )
        if served and "divergence" in needs:
            yield (
                f"objective.distill.of = all needs whole distributions, which teachers.{served[0]}.place = server does not "
                "send; set place = ranks, or distill.of = top_k or sampled"
            )
        on_ranks = [name for name in teachers if name not in served]
        if on_ranks and objective.teacher_top_k:
            yield (
                f"objective.distill.of = top_k is for served teachers, and teachers.{on_ranks[0]}.place = ranks has the whole "
                "distribution; set distill.of = all, or place = server"
            )
        if served and rollout.sampling.temperature != 1:
            yield (
                f"teachers.{served[0]}.place = server scores at temperature 1, and rollout.sampling.temperature = "
                f"{rollout.sampling.temperature:g}; set that to 1, or place = ranks"
            )
        if teachers and rollout.sampling.truncates:
            yield (
                "teachers with rollout.sampling.top_k: a teacher may not reach the tokens that the policy is limited to; leave "
                "top_k, top_p and min_p out"
            )
