"""Processes that read data and tokenize, and do nothing else, do without torch: loading it takes seconds and 200 MB."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _WithoutTorch(PathFinder):
    """Finds modules as Python does, and says of torch that it is not installed: `transformers` and `datasets` allow for that."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


def hide_torch() -> None:
    """Whatever is imported in this process from now on finds no torch."""
    sys.meta_path[:] = [_WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
