"""What README.md and the requirements promise is what the repository does."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.engine.debug import MODES
from megatrain.precision import PRECISIONS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
LINES = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
COMMANDS = [line.split("#")[0].strip() for line in LINES if line.strip()]
PARTS = [part.strip() for command in COMMANDS for part in command.split("&&")]
REQUIREMENTS = ["requirements.txt", "requirements-dev.txt"]


def run(*arguments: str) -> str:
    """Standard output of a Python command of this repository, which must succeed."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_readme_starts_and_tests_with_one_line_each():
    start, test = ([command for command in COMMANDS if end in command] for end in ("python app.py", "python -m pytest"))
    assert len(start) == len(test) == 1
    assert "pip install -r requirements.txt" in start[0]
    assert test[0] == "pip install -r requirements-dev.txt && python -m pytest"


def test_ci_runs_the_readmes_test_command():
    assert "python -m pytest" in PARTS
    script = (ROOT / ".ci" / "test").read_text("utf-8")
    assert re.search(r"^exec python -m pytest \"\$@\"", script, re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert re.search(r"^\.ci/test ", ci, re.MULTILINE)
    assert re.search(r"^\.ci/check$", ci, re.MULTILINE)
    assert "-r requirements-dev.txt" in ci


@pytest.mark.skipif(os.name == "nt", reason="Windows has no executable bit")
@pytest.mark.parametrize("name", ["run", "check", "test", "size"])
def test_ci_scripts_can_be_started(name):
    assert os.access(ROOT / ".ci" / name, os.X_OK)


def test_files_that_commands_name_exist():
    files = re.findall(r"-r (\S+)|python (\S+\.py)", " ".join(COMMANDS))
    assert files
    for name in filter(None, sum(files, ())):
        assert (ROOT / name).is_file(), name


def test_links_lead_somewhere():
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith(("http", "#"))]
    links += re.findall(r"<img[^>]+src=\"([^\"]+)\"", README)
    assert links
    assert [link for link in links if link and not (ROOT / link).exists()] == []


def test_paths_in_the_text_exist():
    paths = [path for path in re.findall(r"`([\w./-]+)`", README) if path.startswith(("megatrain/", "ui/", "tests/", "assets/", ".ci/"))]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_command_line_has_the_readmes_commands_and_no_others():
    named = [shlex.split(part)[3] for part in PARTS if part.startswith("python -m megatrain ")]
    listed = re.findall(r"^    (\w+)\b", run("-m", "megatrain", "--help").split("COMMAND\n")[1], re.MULTILINE)
    assert sorted(named) == sorted(listed)


@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("python -m megatrain ")])
def test_every_command_explains_itself(part):
    command = shlex.split(part)[3]
    text = run("-m", "megatrain", command, "--help")
    for option in re.findall(r"--[\w-]+", part):
        assert option in text


def test_the_dashboard_has_the_readmes_options():
    text = run("app.py", "--help")
    section = README.split("## Start")[1].split("\n## ")[0]
    options = re.findall(r"`(--[\w-]+)`", section)
    assert options
    for option in options:
        assert option in text


def test_every_environment_variable_is_in_the_table():
    sources = [ROOT / "app.py", *(path for room in ("megatrain", "ui") for path in (ROOT / room).rglob("*.py"))]
    used = {name for path in sources for name in re.findall(r"\bMEGATRAIN_[A-Z_]*[A-Z]", path.read_text("utf-8"))}
    assert set(re.findall(r"^\| `(MEGATRAIN_\w+)` \|", README, re.MULTILINE)) == used


def test_the_debug_switch_lists_its_modes():
    row = next(line for line in README.splitlines() if line.startswith("| `MEGATRAIN_DEBUG`"))
    assert re.findall(r"`(\w+)` \(", row) == list(MODES)


def test_the_precision_table_is_the_codes():
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| (\w+) \| (\d+) bytes", README, re.MULTILINE)
    assert {name: int(kept) for name, _, kept in rows} == {name: precision.kept_bytes for name, precision in PRECISIONS.items()}
    default = re.search(r"`(\w+)` \(default\)", README)
    assert default
    assert default.group(1) == RunConfig().precision


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_requirement_has_a_pin_and_a_reason(name):
    for line in (ROOT / name).read_text("utf-8").splitlines():
        if line and not line.startswith(("#", "-r ")):
            assert re.fullmatch(r"[A-Za-z0-9_.-]+(==|>=)\d[\w.]*(,<\d[\w.]*)?(; [^#]+)? +# \S.+", line), line


def test_torch_is_pinned_exactly():
    assert re.search(r"^torch==2\.13\.0 ", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
