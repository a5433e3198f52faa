"""Drives a headless Chromium over a pipe, with nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_PATIENCE = 90.0  # seconds for one answer
_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36,
          "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip


def executable() -> str:
    """The browser; an error if there is none, for nothing is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed")
    return found


class BrowserError(Exception):
    pass


class Page:
    """One page of a browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0, until - time.monotonic()))
            part = os.read(self._reading, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("the browser has ended, or does not answer")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def show(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file, in a window of a size, and waits until it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + _PATIENCE
        while self.run("document.readyState !== 'complete' || location.href === 'about:blank'"):
            if time.monotonic() > until:
                raise BrowserError("the page is not ready")
            time.sleep(0.02)

    def run(self, code: str) -> Any:
        """Runs an expression in the page; returns its value."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        if "exceptionDetails" in result:
            raise BrowserError(f"{code}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector, in the order of the page."""
        code = f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.textContent)"
        return list(self.run(code))

    def press(self, *keys: str, shift: bool = False) -> None:
        """Presses keys, one after another, as a keyboard does."""
        for key in keys:
            event: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
            if key in _CODES:
                event |= {"windowsVirtualKeyCode": _CODES[key], "code": key}
            typed = (
                {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            )
            self.call("Input.dispatchKeyEvent", type="keyDown", **event, **typed)
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)
        self.settle()

    def pointer(self, selector: str, *, click: bool = True) -> None:
        """Moves the pointer to the middle of an element, and clicks."""
        x, y = self.run(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)});"
            "at.scrollIntoViewIfNeeded(); const box = at.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def picture(self, path: Path) -> None:
        """Writes what is to be seen to a PNG file."""
        self.settle()
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def print_to(self, path: Path) -> None:
        """Prints the page to a PDF file."""
        path.write_bytes(
            base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])
        )

    def complaints(self) -> list[str]:
        """What went wrong in the page since it was opened: exceptions, refusals of its policy."""
        self.run("0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [
            json.dumps(event["params"]) for event in self.events if event.get("method") in kinds
        ]

    def requests(self) -> list[str]:
        """The addresses that the page asked for since it was opened."""
        self.run("0")
        return [event["params"]["request"]["url"] for event in self.events
                if event.get("method") == "Network.requestWillBeSent"]  # fmt: skip


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Starts a browser, gives a page of it, and ends it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        # The browser reads at 3 and writes at 4, so ours must not be there when they are moved.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (from_us, to_us)]
        for end in (from_us, to_us):
            os.close(end)
        command = [
            executable(), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}",
            "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--no-sandbox",
            "--disable-background-networking", "--disable-extensions", "--hide-scrollbars",
            "--force-color-profile=srgb", "--font-render-hinting=none", "--lang=en-US",
        ]  # fmt: skip
        log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, ends[0], 3), (os.POSIX_SPAWN_DUP2, ends[1], 4),
                   (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]  # fmt: skip
        process = os.posix_spawn(command[0], command, os.environ, file_actions=actions, setpgroup=0)
        for end in (*ends, log):
            os.close(end)
        try:
            page = Page(from_it, to_it)
            page.attach()
            yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(from_it)
            os.close(to_it)
