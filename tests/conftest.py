"""What every test shares: an environment without hub, analytics and spinning threads, and the two markers that skip.

The variables are set before anything loads torch or gradio, and child processes inherit them.
"""

import os
import shutil
import sys
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin on a busy machine make everything several times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

# No deadline: how long an example takes says nothing on a shared machine. Derandomized: the same examples everywhere.
hypothesis.settings.register_profile("repository", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repository")

BROWSER_TESTS = os.environ.get("MEGATRAIN_BROWSER_TESTS") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why. Asking for the browser tests makes a missing browser a failure."""
    has_gpu: bool | None = None
    for item in items:
        if item.get_closest_marker("browser") and not BROWSER_TESTS:
            item.add_marker(pytest.mark.skip(reason="set MEGATRAIN_BROWSER_TESTS=1 to drive a real browser"))
        if item.get_closest_marker("gpu"):
            if has_gpu is None:
                import torch

                has_gpu = torch.cuda.is_available()
            if not has_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _own_workspace(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test touches the workspace of the person who runs it, also not through a process that it starts."""
    os.environ["MEGATRAIN_WORKSPACE"] = str(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(autouse=True)
def _usual_arithmetic() -> Iterator[None]:
    """Training in the tests' own process flushes denormal numbers to zero; the next test gets ordinary arithmetic again."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict) -> dict:
    """Debian's chromium where there is one, else the browser that playwright installed; no request leaves the machine."""
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    return {**browser_type_launch_args, "executable_path": shutil.which("chromium"), "args": quiet}
