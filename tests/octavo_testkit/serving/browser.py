"""A headless Chromium, driven over its debugging pipe: no driver, no other package."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser():
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser."""

    def __init__(self, read_fd, write_fd):
        self._read_fd, self._write_fd = read_fd, write_fd
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session = None
        self.problems = []  # what the page's console complained about

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(event["params"]["exceptionDetails"])
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.problems.append(event["params"]["entry"])

    def _next(self):
        while b"\0" not in self._buffer:
            data = os.read(self._read_fd, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def run(self, expression):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not self.run(expression):
            assert time.monotonic() < deadline, f"waited for {expression}"
            time.sleep(0.02)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, code=None, modifiers=0):
        numbers = {"Enter": 13, "Escape": 27, "Tab": 9}
        about = {"key": key, "code": code or key, "modifiers": modifiers}
        about["windowsVirtualKeyCode"] = numbers[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def look(self, *, is_dark=False, width=1200, height=760):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        value = "dark" if is_dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def save_screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browsing(path):
    """A page of the browser at `path`."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    with tempfile.TemporaryDirectory() as profile, contextlib.ExitStack() as stack:
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # Chromium reads its pipe from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", script, path, *arguments],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        stack.callback(os.close, to_us)
        stack.callback(os.close, from_us)
        page = Page(to_us, from_us)
        try:
            yield page
        finally:
            with contextlib.suppress(Exception):
                page._session = None
                page.call("Browser.close")
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
