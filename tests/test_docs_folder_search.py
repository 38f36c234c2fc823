"""Pages that are opened from a folder can be searched, though browsers give them no worker."""

import time
from pathlib import Path
from shutil import copy

import pytest

from helpers.browser import Browser, absent

SCRIPT = Path(__file__).parents[1] / "docs" / "folder_search.js"
# As Material's: it asks for a worker, and its worker answers on its own time.
PAGE = """<!doctype html><html><head><script src="folder_search.js"></script></head><body><script>
const worker = new Worker("workers/worker.js");
worker.addEventListener("message", (event) => { document.title = event.data.answer; });
worker.postMessage({ question: 6 });
</script></body></html>"""
WORKER = """self.known = "IFrameWorker" in parent;
addEventListener("message", async (event) => {
  postMessage({ answer: await Promise.resolve(`${7 * event.data.question} ${self.known}`) });
});"""


@pytest.mark.skipif(absent() is not None, reason=str(absent()))
def test_a_worker_answers_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE, encoding="utf-8")
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "worker.js").write_text(WORKER, encoding="utf-8")
    copy(SCRIPT, tmp_path)
    with Browser() as browser:
        browser.open(tmp_path / "page.html")
        deadline = time.monotonic() + 20
        while not (said := browser.run("return document.title")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert said == "42 true"
        assert browser.complaints() == []
