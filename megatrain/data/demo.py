"""The built-in data: docstring -> code pairs of the running Python's own standard library.

Read from source each time; nothing of it is stored in the repository. Only packages that the demo model was not
pre-trained on give rows. The order is that of module names and lines, so the same Python gives the same rows.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from megatrain.data import stdlib
from megatrain.data.files import Row
from megatrain.errors import DataError

MIN_LINES, MAX_LINES = 4, 35  # of a function: one with less says nothing, one with more does not fit 512 tokens


class DemoSource:
    """Rows {"prompt": a docstring in quotes, "completion": its function without the docstring}."""

    name = "the standard library of Python " + ".".join(map(str, sys.version_info[:3]))
    total = 0
    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or stdlib.library_folder()
        self.files = [path for path in stdlib.files(self.folder) if stdlib.is_demo_package(self._module(path))]
        if not self.files:
            raise DataError(f"The source of Python's standard library is not in {self.folder}.", "Choose a file or folder as data.")

    def _module(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def version(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(self._module(path).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def rows(self) -> Iterator[Row]:
        for path in self.files:
            module = self._module(path)
            for function in stdlib.functions_of(path, module):
                if function.docstring and function.code and MIN_LINES <= function.num_lines <= MAX_LINES:
                    values = {"prompt": f'"""{function.docstring}"""\n', "completion": function.code + "\n"}
                    yield Row(f"{module} line {function.line}", values)
