"""Chromium, driven over its DevTools pipe: real keys, pointer and window sizes, and whatever the page complains of.

Nothing but the standard library and a Chromium that is installed already.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)

KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}
KEYS |= {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}


@contextlib.contextmanager
def open_page(path: Path, profile: Path, *, width: int = 1200, height: int = 900) -> Iterator[Page]:
    """The page of a file, in a window of that size, once it says ``data-ready``."""
    command = [str(BROWSER), "--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-component-update", "--disable-background-networking", "--disable-sync"]
    command += [f"--user-data-dir={profile}", "--force-device-scale-factor=1", "about:blank"]
    command += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser reads from its descriptor 3 and writes to 4; the originals are moved out of the way first.
    read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_browser[0], from_browser[1]))

    def arrange() -> None:
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        command, pass_fds=(3, 4), preexec_fn=arrange, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for fd in (to_browser[0], from_browser[1], read, write):
        os.close(fd)
    page = Page(to_browser[1], from_browser[0])
    try:
        page.attach(width, height)
        page.go(path)
        yield page
    finally:
        with contextlib.suppress(OSError, TimeoutError):
            page.send("Browser.close", session=False)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for fd in (to_browser[1], from_browser[0]):
            os.close(fd)


class Page:
    """One tab.

    Attributes:
        complaints: console errors and warnings, uncaught exceptions, and requests for anything but the page itself.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser = to_browser, from_browser
        self.buffer = b""
        self.number = 0
        self.session: str | None = None
        self.complaints: list[str] = []
        self.address = ""

    def send(self, method: str, session: bool = True, timeout: float = 60, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + timeout
        while True:
            answer = self._receive(until)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_browser], [], [], max(0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.from_browser, 1 << 20)
            if not part:
                raise OSError("the browser has gone")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([argument.get("value") for argument in about["args"]]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent" and about["request"]["url"] != self.address:
            self.complaints.append("request: " + about["request"]["url"])

    def attach(self, width: int, height: int) -> None:
        target = self.send("Target.createTarget", session=False, url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", session=False, targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def go(self, path: Path) -> None:
        self.address = path.as_uri()
        self.send("Page.navigate", url=self.address)
        self.wait("document.body && document.body.dataset.ready !== undefined")

    def wait(self, condition: str, timeout: float = 30) -> None:
        """Until a JavaScript condition holds."""
        until = time.monotonic() + timeout
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} does not hold; {self.complaints}")
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression (of a promise, what it resolves to)."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "exception"))
        return answer["result"].get("value")

    def settle(self) -> None:
        """Waits for two frames, so that what was asked for is painted."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def centre(self, selector: str) -> tuple[float, float]:
        """The middle of an element's first line, after scrolling to it."""
        x, y = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getClientRects()[0]; "
            f"return [b.left + b.width / 2, b.top + b.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        return x, y

    def point(self, selector: str) -> None:
        """Moves the pointer there."""
        x, y = self.centre(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector: str) -> None:
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            code = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
            typed = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **code, **typed)
            self.send("Input.dispatchKeyEvent", type="keyUp", **code)
        self.settle()

    def choose(self, selector: str, value: int) -> None:
        """Chooses an option, as the browser's own list would."""
        self.run(
            f"(e => {{ e.value = {value}; e.dispatchEvent(new Event('change', {{bubbles: true}})); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        self.settle()

    def slide(self, time: int) -> None:
        self.run(
            f"(e => {{ e.value = {time}; e.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
            "(document.querySelector('#time'))"
        )
        self.settle()

    def picture(self, path: Path) -> None:
        """A screenshot of the window."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
