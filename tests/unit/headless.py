"""A headless Chromium over its own debugging pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """Give the path of a browser, if the machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; ``events`` are all that it told of itself."""

    def __init__(self, path: str, profile: Path) -> None:
        # The browser reads commands from 3 and answers on 4.
        for_it, self._out = os.pipe()
        self._in, from_it = os.pipe()
        # Through copies above 4, since a pipe may itself be one of the two.
        script = f'exec 3<&{for_it} 4>&{from_it} && exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, path, "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run",
             "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(for_it, from_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(for_it)
        os.close(from_it)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        page = next(
            target
            for target in self._call("Target.getTargets", {}, None)["targetInfos"]
            if target["type"] == "page"
        )
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session: str = self._call("Target.attachToTarget", attach, None)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)

    def open(self, url: str, *, width: int, height: int = 800, dark: bool = False) -> None:
        """Show a page as wide as that, in light or in dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))

    def evaluate(self, script: str) -> Any:
        """Run a script in the page and give its value."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Save the whole page as it looks."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and wait for its answer."""
        return self._call(method, params, self._session)

    def _call(self, method: str, params: dict[str, Any], session: str | None) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda: self._answers.pop(number, None))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, found: Any, patience: float = 30.0) -> Any:
        end = time.monotonic() + patience
        while not (value := found()):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            self._read()
        return value

    def _read(self) -> None:
        *messages, self._rest = (self._rest + os.read(self._in, 1 << 20)).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)
