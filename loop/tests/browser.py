"""A real headless Chromium, driven over its DevTools websocket: open a page, run script in it, press, look, listen.

`found()` is the program or None. Everything said on the console and every exception of a page is kept in `Page.said`.
"""

import base64
import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*")  # fmt: skip


@functools.cache
def found() -> str | None:
    """The first of NAMES that is there and starts: Ubuntu has a stub by that name."""
    for path in filter(None, map(shutil.which, NAMES)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False).returncode == 0:
                return path
    return None


class Page:
    """One tab. `evaluate` waits for the script's value, promises included, and raises what it raised."""

    def __init__(self, socket):
        self.socket, self.numbers, self.said = socket, itertools.count(1), []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict) -> None:
        kind, p = message["method"], message["params"]
        if kind == "Runtime.exceptionThrown":
            details = p["exceptionDetails"]
            self.said.append("exception: " + details.get("exception", details).get("description", details["text"]))
        elif kind == "Runtime.consoleAPICalled" and p["type"] in ("error", "assert"):
            self.said.append(f"console: {[a.get('value', a.get('description')) for a in p['args']]}")
        elif kind == "Log.entryAdded" and p["entry"]["level"] == "error":
            self.said.append(f"{p['entry']['source']}: {p['entry']['text']} {p['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go there and wait until it has loaded."""
        result = self.call("Page.navigate", url=url)
        if "errorText" in result:
            raise RuntimeError(f"{url}: {result['errorText']}")
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str):
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", "script failed"))
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0):
        """The script's value, once it is true. TimeoutError when it never is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # while a page loads, there may be nothing to run in
                if value := self.evaluate(script):
                    return value
            time.sleep(0.1)
        raise TimeoutError(f"not true within {seconds:g} s: {script}")

    def click(self, script: str) -> None:
        """Press the mouse on the middle of the element that the script gives, once it is there."""
        self.wait(f"!!({script})")
        self.evaluate(f"{script}.scrollIntoView({{block: 'nearest'}})")
        box = self.evaluate(f"{script}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def screenshot(self, path: Path) -> Path:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        return path


@contextlib.contextmanager
def browser():
    """Start the browser; a `Page` of it."""
    import websocket

    profile = tempfile.mkdtemp(prefix="chromium-")
    home = os.environ | {"HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
    command = [found(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=home)
    try:
        port = _port(Path(profile) / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            target = next(t for t in json.load(answer) if t["type"] == "page")
        socket = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=60, suppress_origin=True)
        try:
            yield Page(socket)
        finally:
            socket.close()
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _port(path: Path, process: subprocess.Popen) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(path.read_text().splitlines()[0])
        time.sleep(0.1)
    raise RuntimeError(f"the browser did not start (exit code {process.poll()})")
