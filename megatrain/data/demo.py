"""The built-in data: docstring -> code pairs of the running Python's own standard library.

Read from source with `ast` each time; nothing of it is stored in the repository. The order is that of module names and
lines, so the same Python gives the same rows.
"""

import ast
import hashlib
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatrain.data.files import Row
from megatrain.errors import DataError

MIN_LINES, MAX_LINES = 4, 61
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class DemoSource:
    """Rows {"prompt": a docstring in quotes, "completion": its function without the docstring}."""

    name = "the standard library of Python " + ".".join(map(str, sys.version_info[:3]))
    total = 0
    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(sysconfig.get_paths()["stdlib"])
        self.files = sorted(self._files(), key=lambda path: path.relative_to(self.folder).as_posix())
        if not self.files:
            raise DataError(f"The source of Python's standard library is not in {self.folder}.", "Choose a file or folder as data.")

    def _files(self) -> Iterator[Path]:
        for path in self.folder.rglob("*.py"):
            folders = path.relative_to(self.folder).parts[:-1]
            if not any(part in _SKIPPED_FOLDERS or part.startswith(("config-", ".")) for part in folders):
                yield path

    def version(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.relative_to(self.folder).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def rows(self) -> Iterator[Row]:
        for path in self.files:
            name = path.relative_to(self.folder).as_posix()
            yield from _pairs(path, name)


def _pairs(path: Path, name: str) -> Iterator[Row]:
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            source = file.read()
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return  # files that are broken on purpose
    lines = source.splitlines(keepends=True) if "\f" not in source else source.replace("\f", " ").splitlines(keepends=True)
    functions = [node for node in ast.walk(tree) if isinstance(node, FunctionNode)]
    for node in sorted(functions, key=lambda node: node.lineno):
        pair = _pair(node, lines)
        if pair:
            yield Row(f"{name} line {node.lineno}", {"prompt": pair[0], "completion": pair[1]})


def _pair(node: FunctionNode, lines: list[str]) -> tuple[str, str] | None:
    """The docstring in quotes, and the function's own source without it; None when it is no pair worth learning."""
    docstring = (ast.get_docstring(node) or "").strip()
    if not docstring or len(node.body) < 2 or node.end_lineno is None:
        return None
    if not MIN_LINES <= node.end_lineno - node.lineno + 1 <= MAX_LINES:
        return None
    text = node.body[0]
    if text.end_lineno is None or lines[text.lineno - 1][: text.col_offset].strip():
        return None  # the docstring shares its line with code
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    kept = lines[first - 1 : text.lineno - 1] + lines[text.end_lineno : node.end_lineno]
    code = "".join(line[node.col_offset :] if not line[: node.col_offset].strip() else line for line in kept)
    return f'"""{docstring}"""\n', code.rstrip() + "\n"
