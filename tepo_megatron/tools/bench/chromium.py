"""Controls a headless Chromium by its DevTools protocol (Debian: ``apt-get install chromium``)."""

import base64
import itertools
import json
import os
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tepo_megatron.tools.results import Table

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 300.0
_START = ("sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1')  # the browser reads from 3 and writes to 4
_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage"),
)


class _NavigatedError(RuntimeError):
    pass


class _Tab:
    """``problems``: exceptions, console errors, violations of the content security policy."""

    def __init__(self, browser: subprocess.Popen[bytes]) -> None:
        assert browser.stdin is not None
        assert browser.stdout is not None
        self._requests, self._answers = browser.stdin, browser.stdout.fileno()
        self._numbers, self._buffer = itertools.count(1), b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": params, **self._session}
        self._requests.write(json.dumps(request).encode() + b"\0")
        self._requests.flush()
        while (message := self._receive()).get("id") != number:
            self._note(message)
        if "error" in message and "navigated" in message["error"].get("message", ""):
            raise _NavigatedError(f"the page was left before it answered {method}")
        if "error" in message:
            raise RuntimeError(f"the browser refused {method}: {message['error'].get('message')}")
        return dict(message["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], _TIMEOUT_S)
            data = os.read(self._answers, 2**20) if ready else b""
            if not data:
                raise RuntimeError("Chromium has ended" if ready else f"Chromium said nothing for {_TIMEOUT_S:.0f} s")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

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
def chromium() -> Iterator[_Tab]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise RuntimeError(f"no Chromium is installed (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium")
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # as root it refuses to start with a sandbox
    with tempfile.TemporaryDirectory(prefix="tepo-chromium-", ignore_cleanup_errors=True) as profile:
        command = [*_START, program, f"--user-data-dir={profile}", *_OPTIONS, *sandbox]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as browser:
            try:
                yield _Tab(browser)
            finally:
                browser.terminate()
                with suppress(subprocess.TimeoutExpired):
                    browser.wait(20)
                browser.kill()


def _exception(details: Mapping[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))


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


def _load(page: _Tab, html: Path, state: str) -> tuple[float, float]:
    """Milliseconds until the page was drawn, and until it was parsed."""
    page.open(html, state)
    if failed := page.evaluate("document.body.dataset.failed"):
        raise RuntimeError(f"{html} cannot be shown: {failed}")
    parsed = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
    return float(page.evaluate("document.body.dataset.ready")), float(parsed)
