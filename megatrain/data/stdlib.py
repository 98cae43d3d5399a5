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
PAIR_LINES = (4, 61)  # of a function that is asked for: one with less says nothing, one with more is too long to learn


@dataclass(frozen=True)
class Function:
    """One function or method. `module` is its file below the library's folder, with forward slashes."""

    module: str
    line: int
    name: str
    docstring: str  # indentation removed; empty when there is none
    source: str  # from the first decorator to the last line, indentation removed
    code: str  # `source` without the docstring


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


def functions(folder: Path | None = None, lines: tuple[int, int] = PAIR_LINES) -> Iterator[Function]:
    """Every function with least to most `lines`, file by file, and a class's after the file's own; nested ones with their parent."""
    root = folder or library_folder()
    for path in files(root):
        for function in functions_of(path, path.relative_to(root).as_posix()):
            if lines[0] <= function.source.count("\n") + 1 <= lines[1]:
                yield function


def files(root: Path) -> list[Path]:
    """The library's source files in the order of their names; the skipped folders are not entered, for some are large."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def demo_rows(folder: Path | None = None) -> Iterator[dict[str, list[dict[str, str]]]]:
    """The demo's rows in `messages` format: the user gives a docstring, the assistant the function without it.

    Only functions of demo packages that do something besides having a docstring.
    """
    for function in functions(folder):
        if is_demo_package(function.module) and function.docstring and _has_body(function.code):
            yield {"messages": [{"role": "user", "content": function.docstring}, {"role": "assistant", "content": function.code}]}


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
    docstring = ast.get_docstring(node, clean=False)
    kept = range(first, last + 1)
    without = list(kept)
    if docstring is not None:
        statement = node.body[0]
        without = [number for number in kept if not statement.lineno <= number <= (statement.end_lineno or statement.lineno)]
    return Function(
        module=module,
        line=first,
        name=node.name,
        docstring=inspect.cleandoc(docstring or ""),
        source=_dedented(lines[number - 1] for number in kept),
        code=_dedented(lines[number - 1] for number in without),
    )


def _has_body(code: str) -> bool:
    """Whether something is left of a function whose docstring was taken out."""
    try:
        ast.parse(code)
    except SyntaxError:  # a signature with nothing after it, or a docstring on the line of its `def`
        return False
    return True


def _dedented(lines: Iterator[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip("\n")
