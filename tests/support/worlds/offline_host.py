"""vLLM's offline engines behind the routes that ``rollout.client.Client`` asks for: offline_host, orders on standard input.

An order is a line of JSON: {"start": PORT, "model": FOLDER, "tp": N} or {"stop": PORT}. vLLM is imported once and every engine
is a fork of this process, so that one more takes two seconds. When the input ends, the engines do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from tepo_megatron.config.rollout import ServerConfig
from tepo_megatron.sampler.vllm.resources import worker_cores
from tepo_megatron.sampler.vllm.wire import FORK_VARIABLE, SAMPLES, head_frame, response_frame
from tepo_megatron.weights.transfer.transport import BACKEND

HOST = "127.0.0.1"

Route = Callable[[dict[str, Any]], dict[str, Any] | bytes | None]


def build(model: str, tp: int) -> LLM:
    """The engine as ``rollout.server`` would have it, its workers forks of this process as there."""
    os.environ[FORK_VARIABLE] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = worker_cores(ServerConfig(tp=tp), 1)[0]
    return LLM(
        model,
        dtype="float32",
        tensor_parallel_size=tp,
        max_model_len=64,
        max_num_seqs=32,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_chunked_prefill=False,
        num_gpu_blocks_override=64,  # of the KV cache, whose memory is written when it is made
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        weight_transfer_config={"backend": BACKEND},
    )


def routes(llm: LLM) -> dict[str, Route]:
    """What the engine does for each path; nothing runs between requests, so there is nothing to pause."""
    return {
        SAMPLES: lambda body: generate(llm, body),
        "/pause": lambda _: None,
        "/resume": lambda _: None,
        "/reset_prefix_cache": lambda _: {"success": llm.reset_prefix_cache()},
        "/init_weight_transfer_engine": llm.init_weight_transfer_engine,
        "/start_weight_update": lambda _: llm.start_weight_update(),
        "/update_weights": llm.update_weights,
        "/finish_weight_update": lambda body: llm.finish_weight_update(body["weight_version"]),
    }


def generate(llm: LLM, body: dict[str, Any]) -> bytes:
    """As our plugin answers when it is asked for samples."""
    parameters = [
        SamplingParams(**body["sampling"], seed=wanted["seed"], max_tokens=wanted["max_tokens"], logprobs=0, detokenize=False)
        for wanted in body["samples"]
    ]
    prompts = [{"prompt_token_ids": [*body["prompt"], *wanted["prefix"]]} for wanted in body["samples"]]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    drawn = [frame(wanted["sample"], output.outputs[0]) for wanted, output in zip(body["samples"], outputs, strict=True)]
    return b"".join(drawn) + head_frame({"end": len(drawn)})


def frame(number: int, sample: Any) -> bytes:
    logprobs = [of_token[token].logprob for token, of_token in zip(sample.token_ids, sample.logprobs, strict=True)]
    versions = [(span.start, span.version) for span in sample.weight_versions]
    return response_frame(number, sample.token_ids, logprobs, sample.finish_reason, versions)


def serve(model: str, tp: int, port: int) -> None:
    """Answers one request after the other until the process is ended; the port opens when the engine is up."""
    table: dict[str, Route] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            try:
                self._answer(200, table[self.path.partition("?")[0]](body) or {})
            except Exception as error:
                traceback.print_exc()
                self._answer(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

        def _answer(self, status: int, content: dict[str, Any] | bytes) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = HTTPServer((HOST, port), Handler, bind_and_activate=False)
    server.server_bind()  # at once: before the engine is up, a connection of another process could take the port
    table.update(routes(build(model, tp)))
    server.server_activate()
    server.serve_forever()


def fork(order: dict[str, Any]) -> int:
    """The process that serves this order's engine, in a group with its workers."""
    child = os.fork()
    if child:
        os.setpgid(child, child)
        return child
    try:
        serve(order["model"], order["tp"], order["start"])
    except BaseException:
        traceback.print_exc()
        os.kill(os.getppid(), signal.SIGINT)  # who waits for this engine need not wait for its time-out
    finally:
        os._exit(1)


def end(child: int) -> None:
    os.killpg(child, signal.SIGTERM)  # not SIGKILL: Python's resource tracker, of the same group, has shared memory to unlink
    os.waitpid(child, 0)


def sweep() -> None:
    """Unlink the shared memory of vLLM's collectives, which its C++ leaves where a worker ends without destructors, as a fork.

    It is named as the files at which the workers meet, in this process' own temporary folder.
    """
    for meeting in Path(tempfile.gettempdir()).glob("vllm_dist_*"):
        for left in Path("/dev/shm").glob(f"{meeting.name}-*"):
            left.unlink()


def main() -> None:
    children: dict[int, int] = {}
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if "start" in order:
                children[order["start"]] = fork(order)
            else:
                end(children.pop(order["stop"]))
    finally:
        for child in children.values():
            end(child)
        sweep()


if __name__ == "__main__":
    main()
