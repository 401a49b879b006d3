"""Headless Chromium by its debugging pipe: pages of files at any width, in light and dark, and by keyboard.

Chromium is not among what LoKA requires. Tests that need it are skipped where there is none.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SKIPPED = "there is no Chromium here (on Debian: apt-get install chromium)"
_SECONDS = 300  # that a browser may take before it is ended
_KEYS = {"Tab": 9, "Enter": 13}  # key codes


class Browser:
    """A browser with one page. Errors of the protocol are RuntimeErrors."""

    def __init__(self) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")

        def as_three_and_four() -> None:
            """Chromium reads commands on descriptor 3 and writes to 4."""
            read, write = os.dup(to_read), os.dup(to_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            ["timeout", str(_SECONDS), str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=as_three_and_four, close_fds=False,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.requests: list[str] = []
        self.problems: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def open(self, path: Path, width: int = 800, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of so many pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self._call("Page.navigate", url=path.resolve().as_uri())
        while self.value("document.readyState") != "complete" or self.value("location.protocol") != "file:":
            pass

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. The page itself has no scripts."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release Tab or Enter."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def screenshot(self, path: Path) -> None:
        """A PNG of the whole page."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for found in self._messages():
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                result: dict[str, Any] = found["result"]
                return result
        raise RuntimeError(f"{method}: Chromium has ended")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Messages as they come; what the page requests and complains about is kept."""
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._read, 1 << 20)
                if not read:
                    return
                self._rest += read
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                self.problems.append(json.dumps(message["params"]))
            yield message


@contextmanager
def browser() -> Iterator[Browser]:
    """Context with a browser, ended at its end."""
    with Browser() as made:
        yield made
