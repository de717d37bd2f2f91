"""Servers of ``tepo serve``, on other nodes or beside ranks that may be restarted (decision 043), registered on a disk."""

import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tepo_megatron.config import RunConfig
from tepo_megatron.config.load import dump_resolved
from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.errors import describe
from tepo_megatron.runtime.files import write_atomically
from tepo_megatron.runtime.restarts import job_name
from tepo_megatron.runtime.supervise import locked_folder
from tepo_megatron.runtime.text import is_key, parse_json
from tepo_megatron.sampler.vllm.server import Server

_KEY = "key"
_FAILED = "failed"
_CLOSED = "closed"  # written when the trainer has ended: servers end too, where no Slurm does it
_POLL_INTERVAL_S = 0.5
_WATCH_INTERVAL_S = 1.0
_REGISTRY = "TEPO_SERVERS"
_COMMAND = (sys.executable, "-m", "tepo_megatron", "serve")
_STOP_TIMEOUT_S = 60.0


class _Registration(NamedTuple):
    url: str
    life: str
    model: str = ""  # folder of the weights that it may have read; earlier versions wrote none


class RegistryEntry:
    def __init__(self, folder: Path, index: int) -> None:
        self._path = folder / f"server-{index}"

    def register(self, url: str, life: str, model: str = "") -> None:
        write_atomically(self._path.with_suffix(".json"), json.dumps(_Registration(url, life, model)._asdict()))

    def registered(self) -> _Registration | None:
        """Raises RuntimeError for another file than ``tepo serve`` writes."""
        path = self._path.with_suffix(".json")
        try:
            values = parse_json(path.read_bytes(), path, dict)
            registration = _Registration(str(values.get("url")), str(values.get("life")), str(values.get("model", "")))
            if not re.fullmatch(r"http://[\w.:\[\]%-]+:\d+/?", registration.url, re.ASCII) or not registration.life.isalnum():
                raise ValueError("it lacks a server's url and life")
            return registration
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RuntimeError(f"{path} is damaged ({error}); remove it, and start 'tepo serve' on its node again") from error

    def claim(self, life: str, *, frozen: bool = False) -> bool | None:
        """Returns False if another trainer has this life: the server may hold its weights; None if it is this job's, from
        before its ranks were restarted. Several may read a ``frozen`` life, which no trainer then has.
        """
        path, shared = self._path.with_suffix(f".{life}.claimed"), self._path.with_suffix(f".{life}.shared")
        if frozen:
            shared.touch()
            return not path.exists()
        try:
            with path.open("x", encoding="ascii") as file:
                file.write(job_name())
        except FileExistsError:
            return None if job_name() and path.read_text("ascii", "replace") == job_name() else False
        return not shared.exists()

    def retire(self, life: str) -> None:
        """The server's node then starts another life."""
        write_atomically(self._path.with_suffix(".retired"), life)

    def is_retired(self, life: str) -> bool:
        with suppress(FileNotFoundError):
            return self._path.with_suffix(".retired").read_text() == life
        return False


def shared_key(folder: Path) -> str:
    """The first caller makes the key. Raises RuntimeError if another user can write the folder or read the key."""
    path = folder / _KEY
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(
            folder, stat.S_IWGRP | stat.S_IWOTH, "write to it: they could put a server of theirs in place of one of this run's"
        )
        if not path.exists():
            draft = folder / f".{_KEY}.{secrets.token_hex(8)}"
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32))
            with suppress(FileExistsError):
                os.link(draft, path)  # of several that try at once, one wins
            draft.unlink()
        _check_private(path, stat.S_IRWXG | stat.S_IRWXO, "open it: they could change the weights of this run's servers")
        if not is_key(key := path.read_text("utf-8", "replace")):
            raise RuntimeError(f"{path} holds no key; remove it, and the next start writes another")
        return key
    except OSError as error:
        raise RuntimeError(
            f"the key of the rollout servers cannot be written to {folder} ({error.strerror}); "
            "set rollout.server.registry to a folder that all nodes can write"
        ) from error


def _check_private(path: Path, forbidden: int, what: str) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & forbidden:
        raise RuntimeError(
            f"{path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}, so that others can "
            f"{what}; remove it, or set rollout.server.registry to a new folder of yours"
        )


def with_local_address(config: ServerConfig) -> ServerConfig:
    """Sets this machine's address on the nodes' inner network."""
    name, host = config.interface, socket.gethostname()
    if name is not None:
        interfaces = psutil.net_if_addrs()
        addresses = [one.address for one in interfaces.get(name, ()) if one.family == socket.AF_INET]
        if not addresses:
            raise ValueError(
                f"rollout.server.interface = {name!r} has no IPv4 address on {host}; interfaces here: {', '.join(interfaces)}"
            )
        return config.model_copy(update={"host": addresses[0]})
    try:
        address = socket.gethostbyname(host)
        why = f"its loopback address {address}, which other nodes do not reach"
    except OSError as error:
        address, why = "", f"no address ({error})"
    if not address or address.startswith("127."):
        raise ValueError(
            f"this machine's name {host!r} stands for {why}; set rollout.server.interface to the interface of the nodes' inner "
            "network (lo where all is on one machine)"
        )
    return config.model_copy(update={"host": address})


class ExternalServer:
    """``start`` and ``stop`` only decide whether to wait for a server; starting a failed one again retires it.

    ``model``: a server of another folder is refused, as its own weights are used.
    """

    was_used = False  # by this job's ranks, before they were restarted

    def __init__(
        self,
        config: ServerConfig,
        *,
        registry: Path,
        index: int,
        key: str,
        log: Path,
        model: Path | None = None,
        frozen: bool = False,
    ) -> None:
        self.config, self.log, self.port, self._frozen = config, log, 0, frozen
        self._model = None if model is None else str(model.resolve())
        self._registry, self._index, self._key = registry, index, key
        self._entry = RegistryEntry(registry, index)
        self._current: _Registration | None = None
        self._retired = self._to_retire = ""
        self._is_waiting = False

    @property
    def url(self) -> str:
        return self._current.url if self._current else ""

    @property
    def alive(self) -> bool:
        return self._current is not None

    def start(self, taken: Collection[int] = ()) -> None:
        self.stop()
        with suppress(OSError):  # wait_ready tries again
            self._retire()
        self._is_waiting = True

    def _retire(self) -> None:
        if self._to_retire:
            self._entry.retire(self._to_retire)
            self._to_retire = ""

    def wait_ready(self) -> None:
        timeout_s = self.config.start_timeout_s
        deadline, problem = time.monotonic() + timeout_s, ""
        while self._is_waiting:
            try:
                if self._find():
                    return
            except OSError as error:
                problem = f" At times the disk answered: {error}."
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"external rollout server {self._index} was not there within {timeout_s:g} s "
                    "(rollout.server.start_timeout_s); does 'tepo serve' run on its node, and is its registry "
                    f"{self._registry}?{problem} {self.log_end()}"
                )
            time.sleep(_POLL_INTERVAL_S)
        raise RuntimeError(f"waiting for external rollout server {self._index} was ended")

    def _find(self) -> bool:
        self._retire()
        newest = self._entry.registered()
        is_new = newest is not None and newest.life != self._retired and not self._entry.is_retired(newest.life)
        if newest is not None and is_new and Server.is_healthy(newest.url):
            if self._model not in (None, newest.model):
                raise ValueError(
                    f"external rollout server {self._index} of {self._registry} serves "
                    f"{newest.model or 'an unknown model (a trainer sends it weights, or its version names none)'}, not "
                    f"{self._model}; start its 'tepo serve' again with --teacher, or with model.path = {self._model} (the path "
                    "must be the same on all machines) and rollout.server.load_format = model"
                )
            is_free = self._entry.claim(newest.life, frozen=self._frozen)
            if is_free or (is_free is None and Server.is_usable(newest.url, self._key)):
                self._current, self.was_used = newest, not is_free
                return True
            self._retired = self._to_retire = newest.life  # another trainer's weights are in it, or a part of this job's
            self._retire()
        if failures := sorted(self._registry.glob(f"{_FAILED}-*")):
            raise RuntimeError(failures[0].read_text("utf-8", "replace"))
        return False

    def healthy(self) -> bool:
        current = self._current
        if current is None:
            return False
        with suppress(OSError, RuntimeError):  # a disk that does not answer says nothing about the server
            if self._entry.registered() not in (current, None):
                return False  # another life at its address does not have its weights
        return Server.is_healthy(current.url)

    def stop(self) -> None:
        self._is_waiting = False
        if self._current is not None:
            self._retired = self._to_retire = self._current.life
            self._current = None

    def log_end(self) -> str:
        return f"Its log is {self.log}"


def serve_node(config: RunConfig, *, model_dir: Path, node: int, nodes: int, logs: Path | None = None) -> None:
    """Runs a node's share of the servers until interrupted or the trainer ends, and replaces dead and retired ones.

    Raises ValueError if nodes cannot have equal shares, RuntimeError if a server does not start or dies too often.
    """
    server = config.rollout.server
    if server.registry is None:
        raise ValueError(
            "tepo serve needs rollout.server.placement = external and rollout.server.registry, a folder that it shares with "
            "the trainer; with placement = local, 'tepo train' starts the servers itself"
        )
    if not 0 <= node < nodes:
        raise ValueError(f"node {node} is not one of {nodes} nodes; number them from 0")
    if server.count % nodes:
        raise ValueError(f"rollout.server.count = {server.count} servers cannot be spread over {nodes} nodes; give a multiple")
    size = server.count // nodes
    share = range(node * size, (node + 1) * size)
    serve(with_local_address(server), config, server.registry, share, model_dir=model_dir, name=str(node), logs=logs)


def serve(
    server: ServerConfig,
    config: RunConfig,
    registry: Path,
    share: range,
    *,
    model_dir: Path,
    name: str,
    first_gpu: int = 0,
    logs: Path | None = None,
) -> None:
    """``name``: of the process, for its failure in the registry, which trainers raise."""
    failed = registry / f"{_FAILED}-{name}"
    failed.unlink(missing_ok=True)
    try:
        _serve(server, config, registry, share, model_dir=model_dir, first_gpu=first_gpu, logs=logs or config.output / "logs")
    except (ValueError, RuntimeError, OSError) as error:
        with suppress(OSError):  # the registry's disk may be the cause
            write_atomically(failed, describe(error))
        raise


def _serve(
    server: ServerConfig, config: RunConfig, registry: Path, share: range, *, model_dir: Path, first_gpu: int, logs: Path
) -> None:
    servers = Server.make_all(
        server,
        share,
        key=shared_key(registry),
        model_dir=model_dir,
        dtype=config.model.dtype,
        stop_token_ids=(),
        log_dir=logs,
        seed=config.seed,
        first_gpu=first_gpu,
        trained=True,
        adapter_rank=config.adapter_rank,
        tokenizer=config.rollout.sampling.needs_tokenizer,
    )
    waits = server.starts_with_dummies(trained=True) or config.adapter_rank is not None  # for a trainer
    model = "" if waits else str(model_dir.resolve())
    entries, lives = [RegistryEntry(registry, index) for index in share], [""] * len(servers)
    restarts, gone, failure = 0, list(range(len(servers))), ""
    try:
        while not _is_certain((registry / _CLOSED).exists):
            for slot in gone:
                servers[slot].stop()
            taken = {one.port for one in servers if one.alive}
            for slot in gone:
                servers[slot].start(taken)
                taken.add(servers[slot].port)
            for slot in gone:
                try:
                    servers[slot].wait_ready()
                except RuntimeError as error:
                    if not lives[slot]:
                        raise  # what keeps a first start from success is there at the next
                    failure = f" The last failed start: {error}".partition("\n")[0]
                    continue  # the watch below finds it dead
                lives[slot] = secrets.token_hex(8)
                entries[slot].register(servers[slot].url, lives[slot], model)
            time.sleep(_WATCH_INTERVAL_S)
            states = enumerate(zip(servers, entries, lives, strict=True))
            gone = [slot for slot, (one, entry, life) in states if not one.alive or _is_certain(entry.is_retired, life)]
            restarts += len(gone)
            if restarts > server.max_restarts * len(servers):
                ends = "\n".join(servers[slot].log_end() for slot in gone)
                raise RuntimeError(f"the servers of this node died {restarts} times; none is started again.{failure}\n{ends}")
    finally:
        for one in servers:
            one.stop()


def _is_certain(question: Callable[..., bool], *args: str) -> bool:
    with suppress(OSError):  # a disk that does not answer says nothing; the caller asks again
        return question(*args)
    return False


def registry_for_ranks() -> Path | None:
    """None if rank 0 starts its servers itself."""
    folder = os.environ.get(_REGISTRY)
    return Path(folder) if folder else None


@contextmanager
def servers_for_ranks(config: RunConfig) -> Iterator[None]:
    """The servers outlive ranks, but not this process. Ranks that start in the context use them."""
    with locked_folder() as folder:
        registry, run, stopped = folder / "servers", folder / "run.yaml", threading.Event()
        registry.mkdir(mode=0o700)
        run.write_text(dump_resolved(config), encoding="utf-8")
        command = [*_COMMAND, str(run), "--for-ranks", str(registry)]
        environment = {**os.environ, "LOCAL_WORLD_SIZE": str(config.engine.parallel.world_size)}
        arguments = (command, environment, registry, config.rollout.server.max_restarts, stopped)
        holder = threading.Thread(target=_hold_servers, args=arguments, name="servers", daemon=True)
        holder.start()
        os.environ[_REGISTRY] = str(registry)
        try:
            yield
        finally:
            del os.environ[_REGISTRY]
            stopped.set()
            holder.join()


def _hold_servers(
    command: Sequence[str], environment: Mapping[str, str], registry: Path, max_restarts: int, stopped: threading.Event
) -> None:
    """Runs ``tepo serve`` until ``stopped``, and starts it again if it was killed."""
    try:
        for _ in range(1 + max_restarts):
            # Its standard input is the pipe that ends it with this process; a Ctrl-C at the terminal is the ranks'.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
            while process.poll() is None and not stopped.wait(_POLL_INTERVAL_S):
                continue
            if stopped.is_set():
                process.communicate(timeout=_STOP_TIMEOUT_S)  # closes its standard input
            if stopped.is_set() or any(registry.glob(f"{_FAILED}-*")):
                return
        sentence = f"ended with exit code {process.returncode}, too often to start it again"
    except subprocess.TimeoutExpired:
        process.kill()  # the servers' supervisors end them
        process.wait()
        return
    except OSError as error:
        sentence = f"cannot be started: {error}"
    write_atomically(registry / f"{_FAILED}-holder", f"the process that holds the rollout servers {sentence}")


def end_with_starter() -> None:
    """Sends this process SIGTERM when standard input closes."""

    def wait() -> None:
        while os.read(0, 1):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="starter", daemon=True).start()
