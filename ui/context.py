"""What a page needs to know of the dashboard around it: the workspace, the selected run, and the way to other pages."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr

from megatrain.errors import RunError
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import find_run
from ui.feed import Feeds

RUN_ID = re.compile(r"[a-z0-9-]{1,40}")


def checked_run_id(value: object) -> str:
    """`value` if it has the form of a run id. Every handler can be called over HTTP, so every one checks."""
    if not isinstance(value, str) or not RUN_ID.fullmatch(value):
        raise RunError("This is no run id.", "Choose a run in the list.")
    return value


@dataclass
class Context:
    """Handed to every page's build(). Holds components and the workspace, never the state of a run."""

    workspace: Path
    feeds: Feeds
    run: gr.Textbox  # id of the selected run; hidden, and kept by the browser when the server restarts
    tabs: gr.Tabs
    pages: dict[str, gr.Tab] = field(default_factory=dict)

    @property
    def open_outputs(self) -> list[Any]:
        """The outputs that `open_page` fills."""
        return [self.tabs, self.run]

    def open_page(self, name: str, run: str | None = None) -> tuple[Any, Any]:
        """Values for `open_outputs` that show page `name`, and select `run` when one is given."""
        return gr.Tabs(selected=name), gr.skip() if run is None else run

    def store(self, run_id: object) -> RunStore:
        """The run called `run_id` in this workspace; RunError when there is none."""
        return find_run(self.workspace, checked_run_id(run_id))
