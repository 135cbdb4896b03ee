"""A real browser without a window, driven over the pipe of its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.machine import PATIENCE

_QUIET = ("--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync")


class Browser:
    """One page of a browser.

    Attributes:
        said: what the page has written to the console, refused by its policy or thrown.

    Args:
        program: path of the browser.
        profile: an empty folder for its files.
    """

    def __init__(self, program: str, profile: Path) -> None:
        self.said: list[str] = []
        self._count = 0
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        line = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        words = ["bash", "-c", line, program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [*_QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        with (profile.parent / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, pass_fds=(commands, answers))
        os.close(commands)
        os.close(answers)
        self._answers = os.fdopen(self._in, "rb", buffering=0)
        self._rest = b""
        page = next(one for one in self._do("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = None
        self._session = self._do("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._do(f"{domain}.enable")

    _session: str | None = None

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Give the page a size, and say whether its reader likes it dark."""
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Go to an address and wait until the page is there."""
        self._do("Page.navigate", url=address)
        self.run("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, script: str) -> Any:
        """Return what a script comes to, waiting for promises."""
        found = self._do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Write a picture of the page, as PNG, or as WebP where the file is named so."""
        form = {"format": "webp", "quality": 80} if file.suffix == ".webp" else {"format": "png"}
        found = self._do("Page.captureScreenshot", captureBeyondViewport=whole, **form)
        file.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._answers.close()
        os.close(self._out)

    def _do(self, method: str, **params: object) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            about = answer.get("params", {})
            match answer.get("method"):
                case "Runtime.consoleAPICalled":
                    self.said.append(" ".join(str(one.get("value")) for one in about["args"]))
                case "Runtime.exceptionThrown":
                    self.said.append(about["exceptionDetails"].get("text", ""))
                case "Log.entryAdded":
                    self.said.append(about["entry"]["text"])
        assert "error" not in answer, answer["error"]
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._answers.read(1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found
