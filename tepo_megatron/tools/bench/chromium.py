"""Controls a headless Chromium by its DevTools protocol (Debian: ``apt-get install chromium``)."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tepo_megatron.tools.results import Table

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 300.0

_START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
"""The browser reads from file descriptor 3 and writes to 4."""

_LOWEST_FD = 20  # keeps the pipes' own descriptors off 3 and 4


class _NavigatedError(RuntimeError):
    pass


class Tab:
    """``problems`` collects exceptions, console errors, and violations of the content security policy."""

    def __init__(self, pipes: _Pipes, session: str) -> None:
        self._pipes, self._session = pipes, session
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._pipes.send(method, params, self._session)
        while True:
            message = self._pipes.receive()
            if message.get("id") == number:
                if "error" in message and "navigated" in message["error"].get("message", ""):
                    raise _NavigatedError(f"the page was left before it answered {method}")
                if "error" in message:
                    raise RuntimeError(f"the browser refused {method}: {message['error'].get('message')}")
                return dict(message["result"])
            self._note(message)

    def open(self, path: Path, state: str = "") -> None:
        """Waits until the page with ``#state`` is drawn or failed."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.resolve().as_uri()}#{state}")
        self.wait_for("document.body?.dataset.ready || document.body?.dataset.failed")

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {_exception(result['exceptionDetails'])}")
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            with suppress(_NavigatedError):
                if value := self.evaluate(expression):
                    return value
            time.sleep(0.02)
        raise RuntimeError(f"the page never came to {expression}; its problems: {self.problems}")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """In CSS pixels."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1.0, mobile=phone)
        preferred = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[preferred])

    def screenshot(self, png: Path) -> None:
        png.parent.mkdir(parents=True, exist_ok=True)
        png.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _note(self, message: Mapping[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(_exception(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(str(params["entry"]["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.problems.append(" ".join(str(item.get("value")) for item in params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(str(params["request"]["url"]))


@contextmanager
def chromium() -> Iterator[Tab]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise RuntimeError(f"no Chromium is installed (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="tepo-chromium-", ignore_cleanup_errors=True) as profile:
        pipes = _Pipes()
        ends = (str(pipes.browser_reads), str(pipes.browser_writes))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, *ends, program, *_options(profile)],
            pass_fds=(pipes.browser_reads, pipes.browser_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        pipes.close_browser_side()
        try:
            target = pipes.ask("Target.createTarget", url="about:blank")["targetId"]
            yield Tab(pipes, pipes.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        finally:
            with suppress(OSError, RuntimeError):
                pipes.send("Browser.close", {})
            pipes.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _options(profile: str) -> Sequence[str]:
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # as root it refuses to start with a sandbox
    return (
        *("--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu", "--hide-scrollbars"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage", *sandbox),
    )


def _exception(details: Mapping[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))


class _Pipes:
    def __init__(self) -> None:
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        self.browser_reads, self.browser_writes = (fcntl.fcntl(item, fcntl.F_DUPFD, _LOWEST_FD) for item in (reads, writes))
        os.close(reads)
        os.close(writes)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._messages: list[dict[str, Any]] = []

    def close_browser_side(self) -> None:
        os.close(self.browser_reads)
        os.close(self.browser_writes)

    def close(self) -> None:
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, params: Mapping[str, Any], session: str | None = None) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._out, rest) :]
        return number

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = self.send(method, params)
        while (message := self.receive()).get("id") != number:
            pass
        return dict(message["result"])

    def receive(self) -> dict[str, Any]:
        while not self._messages:
            ready, _, _ = select.select([self._in], [], [], _TIMEOUT_S)
            data = os.read(self._in, 2**20) if ready else b""
            if not data:
                raise RuntimeError("Chromium has ended" if ready else f"Chromium said nothing for {_TIMEOUT_S:.0f} s")
            *whole, self._buffer = (self._buffer + data).split(b"\0")
            self._messages += [json.loads(item) for item in whole]
        return self._messages.pop(0)


_WINDOWS = {"desktop": (1280, 800), "phone": (390, 844)}


def measure(html: Path, parts: Sequence[str], repeats: int, *, state: str = "", pictures: Path | None = None) -> Table:
    """Medians. ``state``: more of the address, such as ``colour=entropy``. ``pictures``: a folder for screenshots."""
    rows = []
    with chromium() as page:
        for window, (width, height) in _WINDOWS.items():
            for part in parts:
                page.resize(width, height)
                loads = [_load(page, html, f"tab={part}&{state}") for _ in range(repeats)]
                drawn, parsed = (statistics.median(item) for item in zip(*loads, strict=True))
                rows.append((part, window, f"{drawn:.0f}", f"{drawn - parsed:.0f}"))
                for theme in ("light", "dark") if pictures is not None else ():
                    page.resize(width, height, dark=theme == "dark")
                    page.open(html, f"tab={part}&{state}")
                    page.screenshot((pictures or Path()) / f"report-{part}-{window}-{theme}.png")
    return Table(("part", "window", "drawn after, ms", "of which after the file was read, ms"), rows)


def _load(page: Tab, html: Path, state: str) -> tuple[float, float]:
    """Milliseconds until the page was drawn, and until its HTML was parsed."""
    page.open(html, state)
    if failed := page.evaluate("document.body.dataset.failed"):
        raise RuntimeError(f"{html} cannot be shown: {failed}")
    parsed = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
    return float(page.evaluate("document.body.dataset.ready")), float(parsed)
