"""An unfinished form, kept in the workspace: a reload, a second tab or a restarted dashboard finds it again."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatrain.config import RunConfig
from ui import form

NAME = "draft.yaml"
MAX_BYTES = 100_000  # a draft is a few KB; anything larger is no draft


def load(workspace: Path, name: str = NAME) -> list[Any] | None:
    """Widget values of the draft; None when there is none or it cannot be read. Wrong values become defaults."""
    path = workspace / name
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        return form.lenient(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None


def save(workspace: Path, raw: Sequence[Any], name: str = NAME) -> None:
    """Keep widget values as they are, complete or not. A full or read-only disk costs the draft, not the page."""
    nested, _ = form.nest(raw)
    with contextlib.suppress(OSError):
        write(workspace, name, yaml.safe_dump(nested, sort_keys=False, allow_unicode=True))


def save_config(workspace: Path, config: RunConfig) -> None:
    """Make the settings of a run the draft; the name is left for the new run to choose."""
    with contextlib.suppress(OSError):
        write(workspace, NAME, yaml.safe_dump({**config.to_dict(), "name": ""}, sort_keys=False, allow_unicode=True))


def write(workspace: Path, name: str, text: str) -> None:
    """The file `name` of the workspace has this text, or stays as it was; OSError then."""
    temporary = None
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=workspace, prefix=".draft-", delete=False) as file:
            temporary = file.name
            file.write(text)
        os.replace(temporary, workspace / name)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise
