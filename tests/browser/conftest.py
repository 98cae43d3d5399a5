"""A dashboard in this process over a workspace of fake runs, and a page that fails the test when it errs or calls abroad."""

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from gradio.context import Context
from playwright.sync_api import Page

from tests.ui.fake_runs import FakeRun
from ui.dashboard import build
from ui.server import launch

# gradio itself, when it closes its stream of events because the page is left or loaded anew
LEAVING = ("AbortError: signal is aborted without reason", "Unexpected error Connection errored out.")


class Dashboard:
    """One workspace, and a server over it that can be stopped and started again on its port."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.runs: list[FakeRun] = []
        self.address = ""
        self.start()

    def start(self, same_version: bool = True) -> None:
        """As a new process would: with the same code, elements have the same numbers."""
        Context.id = 0 if same_version else 1000
        self.demo = build(self.workspace)
        self.address = launch(self.demo, port=urlsplit(self.address).port or free_port())

    def stop(self) -> None:
        self.demo.close(verbose=False)

    def run(self, name: str = "", **options) -> FakeRun:
        self.runs.append(FakeRun(self.workspace, name, **options))
        return self.runs[-1]

    def link(self, view: str = "monitor", run: FakeRun | None = None, theme: str = "light") -> str:
        chosen = f"&run={run.run_id}" if run else ""
        return f"{self.address}?view={view}{chosen}&__theme={theme}"


    def clear(self) -> None:
        """No run is left."""
        for run in self.runs:
            run.close()
        self.runs.clear()
        if (self.workspace / "runs").exists():
            gone = self.workspace / f"gone-{time.monotonic_ns()}"  # at once, whatever a page that is still open reads there
            (self.workspace / "runs").rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


@pytest.fixture(scope="session")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """One server for all tests: starting it takes longer than most of them."""
    found = Dashboard(tmp_path_factory.mktemp("dashboard"))
    yield found
    found.stop()


@pytest.fixture
def dashboard(_served: Dashboard) -> Iterator[Dashboard]:
    """The dashboard over a workspace without runs."""
    yield _served
    _served.clear()


@pytest.fixture
def page(page: Page) -> Iterator[Page]:
    """pytest-playwright's page, with patience for a busy machine; errors in the console and requests to others are failures."""
    page.set_default_timeout(60_000)
    abroad: list[str] = []
    faults: list[str] = []

    def note(text: str) -> None:
        if not text.startswith(LEAVING):
            faults.append(text)

    page.on("request", lambda request: abroad.append(request.url) if _is_abroad(request.url) else None)
    page.on("pageerror", lambda error: note(str(error)))
    page.on("console", lambda message: note(message.text) if message.type == "error" else None)
    page.faults = faults
    yield page
    assert not abroad, f"requests left the machine: {abroad}"
    assert not faults, f"errors in the page: {faults}"


def free_port() -> int:
    """A port that nobody listens on now; gradio's own search leaves sockets open."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_abroad(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in ("127.0.0.1", "localhost")
