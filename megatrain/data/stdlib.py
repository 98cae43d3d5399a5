"""The functions of the running Python's own standard library, as text: what the built-in demo trains on.

Read at run time from the user's Python, so that no data is shipped. The packages are split by name, the same way on
every machine and in every version of Python: the demo model was pre-trained on one part, and the demo's docstring ->
code pairs come from the other, so that neither its training nor its evaluation rows were seen in pre-training.
"""

import ast
import inspect
import os
import sysconfig
import textwrap
import tokenize
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import DataError

# Tests, tables whose functions are all alike, and third-party code.
SKIPPED = frozenset({"test", "tests", "idle_test", "encodings", "pydoc_data", "ensurepip", "site-packages", "dist-packages", "__pycache__"})
DEMO_SHARE = 4  # one package in this many belongs to the demo


@dataclass(frozen=True)
class Function:
    """One function or method. `module` is its file below the library's folder, with forward slashes."""

    module: str
    line: int
    name: str
    docstring: str  # indentation removed; empty when there is none
    source: str  # from the first decorator to the last line, indentation removed
    code: str  # `source` without the docstring; empty when nothing is left of its body, or both share a line

    @property
    def num_lines(self) -> int:
        return self.source.count("\n") + 1


def library_folder() -> Path:
    """Where this Python's standard library lies as files. DataError when it is packed away (embedded Pythons)."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not (folder / "ast.py").is_file():
        raise DataError(f"This Python's standard library is not a folder of source files ({folder}).", "Choose other data than the demo.")
    return folder


def is_demo_package(module: str) -> bool:
    """Whether `module` ("email/message.py") belongs to the demo's pairs, and so not to pre-training."""
    package = module.split("/")[0].removesuffix(".py")
    return zlib.crc32(package.encode()) % DEMO_SHARE == 0


def functions(folder: Path | None = None) -> Iterator[Function]:
    """Every function of the library, file by file, and a class's after the file's own; nested ones with their parent."""
    root = folder or library_folder()
    for path in files(root):
        yield from functions_of(path, path.relative_to(root).as_posix())


def files(root: Path) -> list[Path]:
    """The library's source files in the order of their names; the skipped folders are not entered, for some are large."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def functions_of(path: Path, module: str) -> Iterator[Function]:
    """The functions of one file; nothing when it does not parse (some libraries hold templates)."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            text = file.read()
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")  # as the parser counts them: a form feed ends no line
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        pending += [child for child in reversed(inner) if isinstance(child, ast.ClassDef)]
        for child in inner:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield _function(child, lines, module)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], module: str) -> Function:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    source = code = lines[first - 1 : last]
    docstring = ast.get_docstring(node, clean=False)
    if docstring is not None:
        text = node.body[0]
        begin, end = text.lineno, text.end_lineno or text.lineno
        shares_a_line = bool(lines[begin - 1][: text.col_offset].strip())
        code = lines[first - 1 : begin - 1] + lines[end:last] if len(node.body) > 1 and not shares_a_line else []
    return Function(module, first, node.name, inspect.cleandoc(docstring or ""), _dedented(source), _dedented(code))


def _dedented(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip("\n")
