"""A page in headless Chromium, driven through two pipes: what it draws, what goes wrong in it, what it fetches."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0


class Page:
    """One tab.

    Attributes:
        errors: What scripts have thrown, and what the browser complains about.
        fetched: Each URL that was asked for.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._received = b""
        self._number = 0
        self._session = {}
        self._loaded = False
        self.errors: list[Any] = []
        self.fetched: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(
        self, path: Path, width: int, height: int, is_phone: bool = False, is_dark: bool = False
    ) -> None:
        """Load a file, and wait until its scripts have run and the page is drawn."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while not self._loaded:
            self._take(self._receive(deadline))
        self.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Save what is seen as a PNG; or the whole page."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            answer = self._call(
                "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
            )
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._take(answer)

    def _take(self, event: dict[str, Any]) -> None:
        method = event.get("method")
        told = event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(told["args"])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"])
        elif method == "Network.requestWillBeSent":
            self.fetched.append(told["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise ConnectionError("the browser has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def opened_browser() -> Iterator[Page]:
    """A browser of its own, with a profile of its own, which no name leads out of this machine."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        flags += [
            "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
        ]
        # It reads from descriptor 3 and writes to 4.
        pipes = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        browser = subprocess.Popen(
            ["bash", "-c", pipes, "bash", CHROMIUM, *flags],
            pass_fds=(to_browser, from_browser),
            env={**os.environ, "TMPDIR": profile},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(commands, answers)
        finally:
            browser.kill()
            browser.wait()
            os.close(commands)
            os.close(answers)
