"""Headless Chromium, driven over its devtools protocol: pages as wide as asked for, light or dark.

Its command line cannot make a window narrower than 500 pixels; the protocol can.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
LOAD_SECONDS = 20.0
SETTLE_SECONDS = 0.4
"""Seconds after which a loaded page has drawn its curves."""


def program() -> str | None:
    """Return the path of Chromium; None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """A browser process; use it in a `with`."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def connect() -> None:
            """Make the pipes the descriptors 3 and 4, which the browser reads and writes."""
            ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs_in, theirs_out)]
            for number, end in enumerate(ends, start=3):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [
                path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank",
            ],
            preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest = 0, b""

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def open(
        self, address: str, *, width: int, height: int = 900, dark: bool = False, scale: float = 1
    ) -> Page:
        """Open a page in a window of this size in CSS pixels. Raises TimeoutError."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip
        page.call("Emulation.setEmulatedMedia", features=scheme)
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.call("Page.navigate", url=address)
        end = time.monotonic() + LOAD_SECONDS
        while page.value("location.href + document.readyState") != address + "complete":
            if time.monotonic() > end:
                raise TimeoutError(f"{address} was not loaded in {LOAD_SECONDS:.0f} s")
            time.sleep(0.05)
        time.sleep(SETTLE_SECONDS)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result. Raises RuntimeError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _message(self) -> bytes:
        while b"\0" not in self._rest:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return message


class Page:
    """An open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol on this page."""
        return self._browser.call(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def picture(self, *, height: int | None = None, whole: bool = True) -> bytes:
        """Return a PNG of the page: the whole page, the window, or its first `height` pixels."""
        more: dict[str, Any] = {"captureBeyondViewport": whole}
        if height is not None:
            width = self.value("document.documentElement.clientWidth")
            more["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])


def save(page: Page, file: Path, **how: Any) -> Path:
    """Write a page's picture to a file, and return it."""
    file.write_bytes(page.picture(**how))
    return file
