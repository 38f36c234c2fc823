"""Chromium, controlled through chromedriver with the standard library."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any


def absent() -> str | None:
    """Return why no browser can be started; None if one can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}: apt-get install chromium chromium-driver"
    return None


class Browser:
    """One window of a given size, in light or dark."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._root = f"http://127.0.0.1:{port}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [f"--window-size={width},{height}", "--hide-scrollbars"]
        options = {"args": flags, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = self._call("/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    self._driver.kill()
                    raise
                time.sleep(0.2)
        self._root += f"/session/{answer['sessionId']}"
        # Headless windows have a minimum width; the emulated screen has none.
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._call("", None, method="DELETE")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=30)

    def open(self, path: Path) -> None:
        """Show a file."""
        self._call("/url", {"url": path.absolute().as_uri()})

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript function body."""
        return self._call("/execute/sync", {"script": script, "args": []})

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._call("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def complaints(self) -> list[str]:
        """Return what the page has written to the console since the last call."""
        return [entry["message"] for entry in self._call("/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> Path:
        """Save a picture of the whole page."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _call(self, path: str, body: Any, *, method: str = "POST") -> Any:
        request = urllib.request.Request(
            self._root + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
