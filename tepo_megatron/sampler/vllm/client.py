import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import httpx
import numpy as np

from tepo_megatron.core.rollout import TOP_TOKEN, Response, TokenIds, WeightsVersion
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.runtime.worker_child import running_time
from tepo_megatron.sampler.protocol import CacheReading, ReadBack, Scores
from tepo_megatron.sampler.sampling import Sample, Sampling
from tepo_megatron.sampler.vllm import wire
from tepo_megatron.sampler.vllm.server import HEALTH_TIMEOUT_S, IDLE_CONNECTION_S, MODEL_NAME
from tepo_megatron.weights.architecture import ModelSpec

_SLEEPS = frozenset({"weights", "kv_cache"})  # vLLM's names
GENERATE = "/inference/v1/generate"  # vLLM's route for token ids, which scores prompts here
_REPEATED = (GENERATE, wire.READ_BACK, wire.SAMPLES)  # by their callers, after a ServerFault
_PROBES = 20
_MAX_INTERVAL_S = 5.0
MORE_THREADS = "raise the limit of processes (ulimit -u, or the container's pids limit)"
_FIRST = -1  # priority of requests before all samples (0)


class ServerFault(RuntimeError):  # noqa: N818
    """The server gave no answer or a wrong one; another try may succeed."""


class ServerSilent(ServerFault):
    """The server's processes may still live."""


class ServerGone(ServerFault):
    """The server refuses connections, or reports a dead engine."""


class Client:
    """Requests to one server, from several threads.

    Raises ServerSilent after ``timeout_s``, ServerFault if the server cannot be reached, fails (status 5xx) or answers wrongly,
    RuntimeError for a refusal. Samples, the canary's requests and receiving weights have no time limit; ``close`` ends
    them. ``asleep``: freed memory. ``routed``: responses must have their experts. ``versions_apart``: versions share no cached
    prompts. ``pool`` is one per server, so that a hanging one blocks no others.
    """

    def __init__(
        self,
        url: str,
        key: str,
        timeout_s: float,
        vocab_size: int | None = None,
        routed: ModelSpec | None = None,
        *,
        versions_apart: bool = False,
        threads: int = 1,
    ) -> None:
        self.url = url
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="rollout")
        try:
            self.pool.submit(int)  # starts a thread, for which requests can wait if there are no more
        except RuntimeError as error:
            raise RuntimeError(f"no request can be sent to {url}: {error}; {MORE_THREADS}, or end others") from error
        self.asleep: frozenset[str] = frozenset()
        self.versions_apart = versions_apart
        self._model = MODEL_NAME
        self._vocab_size, self._routed, self._timeout_s = vocab_size, routed, timeout_s
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_CONNECTION_S),
            trust_env=False,  # the key must not go to a proxy
        )
        self._unbounded = httpx.Timeout(None, connect=min(timeout_s, 10.0))
        self._traced = {"trace": self._note_socket}
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._read_for: WeightsVersion | None = None

    @property
    def is_closed(self) -> bool:
        return self._http.is_closed

    def close(self) -> None:
        """Requests of other threads fail at once."""
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, which closing does not
            self._sockets.clear()
        self._http.close()
        self.pool.shutdown(wait=False)

    def progress(self) -> object:
        """Returns a value that changes with each token and request, or None. Raises ServerGone or ServerSilent."""
        limit = min(self._timeout_s, HEALTH_TIMEOUT_S)
        try:
            health = self._http.get("/health", timeout=limit, extensions=self._traced)
            reply = self._http.get(wire.PROGRESS, timeout=limit, extensions=self._traced) if health.is_success else health
        except httpx.ConnectError as error:
            raise ServerGone(f"{self.url}/health: {error or type(error).__name__}") from error
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: the client was closed
            raise ServerSilent(f"{self.url}/health: no answer within {limit:g} s") from error
        if not health.is_success:
            raise ServerGone(f"{self.url}/health: status {health.status_code}")
        return reply.text if reply.is_success else None

    @cached_property
    def facts(self) -> str:
        """Is empty if the server does not say."""
        with suppress(RuntimeError):  # an older plugin; of a server that is gone the next request says why
            return str(self._post(wire.FACTS, timeout=httpx.Timeout(HEALTH_TIMEOUT_S)).get("facts", ""))
        return ""

    def draw(
        self,
        name: str,
        prompt: Sequence[int] | TokenIds,
        samples: Sequence[Sample],
        sampling: Sampling,
        versions: Callable[[], Sequence[WeightsVersion]],
        *,
        from_cache: bool = True,
        cached: list[int] | None = None,
        updating: Callable[[], bool] = lambda: False,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Response]]:
        """Yields (sample, response) as samples finish.

        ``versions``: weights that may draw tokens, oldest first; the last may be on its way (``updating``). ``cached``
        gets the cached tokens of each sample's prompt; such a request passes waiting ones. ``is_aborted``: ``abort`` was
        called, and unfinished samples come in part.
        Raises ServerFault for a wrong answer, RuntimeError for a token of other weights.
        """
        self._check_awake()
        # In this order. While some servers have new weights and others old ones, no two requests share cached prompts.
        newest = versions()[-1].label
        salt = secrets.token_hex(8) if updating() else newest
        body = {
            "id": name or secrets.token_hex(8),
            "model": self._model,
            "prompt": np.asarray(prompt).tolist(),
            **({"cache_salt": salt} if self.versions_apart else {}),
            **({} if cached is None else {"count_cached": True, "priority": _FIRST}),
            "sampling": {**sampling.parameters(), **({} if from_cache else {"skip_reading_prefix_cache": True})},
            **({"sampling_mask": True} if sampling.sampling_mask else {}),
            "samples": [
                {"sample": one.index, "seed": one.seed, "max_tokens": one.max_new_tokens, "prefix": one.prefix.tolist()}
                for one in samples
            ],
        }
        # Closed here: the garbage collector could do it while a thread holds the lock that this needs.
        with closing(self._stream(wire.SAMPLES, body, self._unbounded)) as pieces:
            try:
                yield from wire.read_responses(
                    pieces,
                    {sample.index: sample for sample in samples},
                    versions,
                    prompt_tokens=len(prompt),
                    vocab_size=self._vocab_size,
                    routed=self._routed,
                    sampling_mask=sampling.sampling_mask,
                    cached=cached,
                    is_aborted=is_aborted,
                )
            except wire.BadAnswer as error:
                message = f"{self.url} {error} (POST {wire.SAMPLES})"
                raise ServerFault(message) if error.repeat else RuntimeError(message) from error

    def abort(self, names: Sequence[str]) -> None:
        self._post(wire.ABORT, {"ids": list(names)})

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        return self.score(prompt, timeout=self._unbounded).logprobs

    def score(self, prompt: Sequence[int], k: int = 0, timeout: httpx.Timeout | None = None) -> Scores:
        """Passes all waiting samples."""
        self._check_awake()
        # prompt_logprobs = 0: only those of the prompt's own tokens; vLLM applies no temperature to them
        sampling = {"max_tokens": 1, "prompt_logprobs": k}
        body = {"model": self._model, "token_ids": list(prompt), "sampling_params": sampling, "priority": _FIRST}
        reply = self._post(GENERATE, body, timeout)
        try:
            scored = reply["prompt_logprobs"][1:]
            places = list(zip(prompt[1:], scored, strict=True))
            logprobs = [float(scores[str(token)]["logprob"]) for token, scores in places]
            top = np.array([_top(scores, token, k) for token, scores in places], TOP_TOKEN).reshape(-1, k) if k else None
            return Scores(logprobs, top)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFault(
                f"{self.url} answered with something else than the log-probs of the prompt: {error!r} (POST {GENERATE})"
            ) from error

    def read_through_cache(self, prompt: Sequence[int], n: int, version: WeightsVersion) -> CacheReading:
        # Drawn, and not the likeliest: log-probs near 0 say little. The same seed draws the same tokens.
        sample, sampling = Sample(0, 0, n), Sampling(1.0, n)
        is_first, self._read_for = self._read_for != version, version  # a second try finds what the first has left there
        counts: list[int] = []
        draw = partial(self.draw, "", prompt, [sample], sampling, lambda: (version,), cached=counts)
        cached, fresh = (dict(draw(from_cache=from_cache))[0] for from_cache in (True, False))
        pairs = zip(cached.response_ids.tolist(), fresh.response_ids.tolist(), strict=False)
        # after a different token the scores are of another text
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return CacheReading(cached.logprobs[:same].tolist(), fresh.logprobs[:same].tolist(), counts[0] if is_first else 0)

    def read_back(self) -> ReadBack:
        self._check_awake()
        reply = self._post(wire.READ_BACK, timeout=self._unbounded)
        try:
            return ReadBack([str(name) for name in reply["changed"]], float(reply["share"]))
        except (KeyError, TypeError, ValueError) as error:
            message = f"{self.url} answered with something else than what its weights are: {error!r} (POST {wire.READ_BACK})"
            raise ServerFault(message) from error

    def pause(self, *, keep_cache: bool = False) -> None:
        self._post("/pause?mode=keep" + ("&clear_cache=false" if keep_cache else ""))

    def resume(self) -> None:
        self._post("/resume")

    def forget(self) -> None:
        """Drops the requests and the cache of a trainer that is gone."""
        self._post("/pause?mode=abort")
        self.resume()

    def sleep(self) -> None:
        """vLLM's level 1 would keep a copy of weights that the next update replaces."""
        self._post("/sleep?level=2")
        self.asleep = _SLEEPS

    def wake_up(self, tag: str) -> None:
        """``tag`` is ``weights`` or ``kv_cache``."""
        if tag in self.asleep:
            self._post(f"/wake_up?tags={tag}")
            self.asleep -= {tag}

    def reset_prefix_cache(self) -> None:
        if self._post("/reset_prefix_cache").get("success") is False:
            raise RuntimeError(
                f"{self.url} did not forget its prefix cache, since requests hold blocks of it; samples that begin as earlier "
                "ones would be of older weights"
            )

    def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Blocks until all members join. ``info``: ``plugin.engine._InitInfo``."""
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def receive_weights(self, info: Mapping[str, Any]) -> None:
        """Blocks until the weights are loaded. ``info``: ``plugin.engine._UpdateInfo``."""
        self._post("/update_weights", {"update_info": info}, self._unbounded)

    def use_adapter(self) -> None:
        self._post(wire.USE_ADAPTER)
        self._model = wire.ADAPTER_NAME

    def finish_weight_update(self, version: WeightsVersion) -> None:
        self._post("/finish_weight_update", {"weight_version": version.label})

    def _check_awake(self) -> None:
        if self.asleep:
            raise RuntimeError(
                f"{self.url} is asleep: its {' and '.join(sorted(self.asleep))} are not on the GPU, and a request would wait "
                "for ever; update its weights and wake it up first"
            )

    def _note_socket(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            with self._lock:
                self._sockets = {old for old in self._sockets if old.fileno() >= 0}
                self._sockets.add(info["return_value"].get_extra_info("socket"))

    def _post(self, path: str, body: dict[str, Any] | None = None, timeout: httpx.Timeout | None = None) -> dict[str, Any]:
        with self._faults(path):
            reply = self._http.post(path, json=body, timeout=timeout or self._http.timeout, extensions=self._traced)
        self._check_status(path, reply)
        try:
            return parse_json(reply.content, "the answer", dict) if reply.content else {}
        except ValueError as error:
            what = f"POST {self.url}{path}: status {reply.status_code}, but {error}: {reply.text[:200]!r}"
            raise ServerFault(what) from error

    def _stream(self, path: str, body: dict[str, Any], timeout: httpx.Timeout) -> Generator[bytes, None, None]:
        with self._faults(path), self._http.stream("POST", path, json=body, timeout=timeout, extensions=self._traced) as reply:
            if not reply.is_success:
                reply.read()
                self._check_status(path, reply)
            yield from reply.iter_raw()

    @contextmanager
    def _faults(self, path: str) -> Iterator[None]:
        request, start = f"POST {self.url}{path}", running_time()
        try:
            yield
        except httpx.ConnectTimeout as error:
            message = f"{request}: no connection within {self._unbounded.connect:g} s"
            raise (ServerFault if path in _REPEATED else ServerSilent)(message) from error
        except httpx.TimeoutException as error:
            # If the whole job was suspended meanwhile, the server was, too. The clock may lag a little.
            has_waited = running_time() - start >= 0.9 * self._timeout_s
            is_repeated = path in _REPEATED and isinstance(error, httpx.ReadTimeout)
            raise (ServerSilent if has_waited or not is_repeated else ServerFault)(
                f"{request}: no answer within {self._timeout_s:g} s (rollout.server.request_timeout_s, {type(error).__name__})"
            ) from error
        except (httpx.TransportError, httpx.StreamError) as error:
            raise ServerFault(f"{request}: {error or type(error).__name__}") from error
        except RuntimeError as error:
            if not self._http.is_closed or isinstance(error, ServerFault):
                raise
            raise ServerFault(f"{request}: {error or type(error).__name__}") from error

    def _check_status(self, path: str, reply: httpx.Response) -> None:
        if not reply.is_success:
            message = f"POST {self.url}{path}: status {reply.status_code}: {_message(reply)}"
            raise ServerFault(message) if reply.is_server_error else RuntimeError(message)


class ProgressWatch:
    """Counts only time in which this process ran. One thread uses it.

    ``probe`` runs in another thread and raises ServerSilent or ServerGone.
    """

    def __init__(self, probe: Callable[[], object], timeout_s: float, on_move: Callable[[], None] = lambda: None) -> None:
        self._probe, self._timeout_s, self._on_move = probe, timeout_s, on_move
        self.interval_s = min(_MAX_INTERVAL_S, timeout_s / _PROBES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._answer: Future[object] | None = None
        self._probed_at = self._checked_at = time.monotonic()
        self._last: object = None
        self._silent_s = 0.0
        self._gone = 0

    def note_progress(self) -> None:
        """Call it at a server's answers and its first request."""
        self._silent_s, self._checked_at, self._gone = 0.0, time.monotonic(), 0

    def look(self) -> str:
        """Returns why the server counts as dead, or ""."""
        now = time.monotonic()
        self._silent_s += min(now - self._checked_at, 2 * self.interval_s)
        self._checked_at = now
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer, None
            if gone := self._take(answer):
                return gone
        if self._answer is None and now - self._probed_at >= self.interval_s:
            self._answer, self._probed_at = self._thread.submit(self._probe), now
        if self._silent_s < self._timeout_s:
            return ""
        return f"no new token of any request within {self._timeout_s:g} s (rollout.server.request_timeout_s)"

    def _take(self, answer: Future[object]) -> str:
        try:
            state = answer.result()
        except ServerSilent:
            return ""
        except ServerGone as error:
            self._gone += 1  # one connection may fail for other reasons
            return str(error) if self._gone > 1 else ""
        if state is not None and state != self._last:
            self._last = state
            self.note_progress()
            self._on_move()
        return ""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _top(scores: Mapping[str, Any], token: int, k: int) -> list[tuple[int, float]]:
    """Leaves the prompt's own token out if it is one too many."""
    ranked = sorted((one["rank"], int(name), float(one["logprob"])) for name, one in scores.items())
    top = [(name, logprob) for _, name, logprob in ranked if name != token or len(ranked) != k + 1]
    if len(top) != k:
        raise ValueError(f"{len(top)} tokens are no top {k}")
    return top


def _message(reply: httpx.Response) -> str:
    try:
        content = parse_json(reply.content, "it")
    except ValueError:
        return reply.text[:500] or "no explanation"
    error = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
