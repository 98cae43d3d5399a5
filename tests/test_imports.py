"""What the dashboard process loads stays light: no torch, and nothing of the page under megatrain.

The import contracts see every import statement; these tests read `sys.modules` of a fresh interpreter, so that they also
see what a third-party package drags in.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
NO_TORCH = next(contract["source_modules"] for contract in CONTRACTS if contract["id"] == "no-torch")

LOAD_EACH = """
import importlib, sys
forbidden, *names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
    found = [banned for banned in forbidden.split(",") if banned in sys.modules]
    if found:
        sys.exit(f"{name} loads {', '.join(found)}")
"""


def modules_under(*names: str) -> list[str]:
    """Dotted names of the modules `names`, and of every module inside those that are packages."""
    found = []
    for name in names:
        folder = ROOT.joinpath(*name.split("."))
        if folder.is_dir():
            files = sorted(path for path in folder.rglob("*.py") if path.name != "__main__.py")
            found += [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
        else:
            found.append(name)
    return found


def load(forbidden: str, modules: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOAD_EACH, forbidden, *modules], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_the_dashboard_loads_has_no_torch():
    light = [name for name in modules_under(*NO_TORCH) if not name.startswith("ui")]
    load("torch,transformers,gradio,plotly", light)


def test_the_pages_have_no_torch():
    load("torch,transformers", modules_under("ui"))


def test_the_engine_has_no_pages():
    load("gradio,plotly,ui", modules_under("megatrain"))


def test_the_command_line_answers_without_torch():
    code = "import sys; from megatrain import cli; sys.exit('torch' in sys.modules or 'gradio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] or "megatrain.cli loads torch or gradio"


@pytest.mark.parametrize("path", sorted(path for room in ("megatrain", "ui") for path in (ROOT / room).rglob("__init__.py")), ids=str)
def test_a_package_file_is_a_docstring(path: Path):
    """Importing one module must not drag in its room."""
    body = ast.parse(path.read_text("utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_no_folder_with_code_lacks_its_package_file():
    folders = {path.parent for room in ("megatrain", "ui") for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
