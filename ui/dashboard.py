"""Assembles the dashboard: the status strip, one tab per page, and links (`?view=monitor&run=...`) that survive a reload.

Not `?page=`: Gradio reads that one itself, and answers 500 when it names none of its own pages.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from megatrain.runs.supervisor import list_runs
from ui.context import Context, checked_run_id
from ui.feed import Feeds
from ui.pages import data, monitor, new_run, runs
from ui.widgets import status_strip
from ui.words import text

PAGES: tuple[tuple[str, Callable[[Context], None]], ...] = (
    ("new_run", new_run.build),
    ("monitor", monitor.build),
    ("runs", runs.build),
    ("data", data.build),
)


def build(workspace: Path) -> gr.Blocks:
    """The whole dashboard over the runs of `workspace`."""
    feeds = Feeds(workspace)
    with gr.Blocks(title=text("shell.title"), analytics_enabled=False, fill_width=True) as demo:
        run = gr.Textbox(visible="hidden", elem_id="selected-run", label="run")
        landed = gr.Textbox(visible="hidden", label="page")
        strip = status_strip(feeds)
        with gr.Tabs(elem_id="pages", overflow_behavior="wrap") as tabs:
            ctx = Context(workspace, feeds, run, tabs)
            for name, build_page in PAGES:
                with gr.Tab(text(f"shell.page_{name}"), id=name, elem_id=f"page-{name}") as tab:
                    ctx.pages[name] = tab
                    build_page(ctx)
        run.change(None, run, strip, js="run => { MegaTrain.remember({run}); return {run}; }")

        def open_monitor(event: gr.EventData) -> tuple[Any, Any]:
            return ctx.open_page("monitor", checked_run_id(event.run))

        def arrive(request: gr.Request) -> tuple[str, str]:
            wanted = dict(request.query_params)
            return landing(feeds, wanted.get("view", ""), wanted.get("run", ""))

        strip.open(open_monitor, None, ctx.open_outputs, show_progress="hidden", api_visibility="private")
        demo.load(arrive, None, [landed, run], show_progress="hidden", api_visibility="private")
        landed.change(None, landed, js="view => MegaTrain.land(view)")
    return demo


def landing(feeds: Feeds, page: str, run: str) -> tuple[str, str]:
    """The page and run that an address asks for; else the live run, else the newest one, else a new run."""
    names = [name for name, _ in PAGES]
    known = {store.run_id for store in list_runs(feeds.workspace)}
    selected = run if run in known else feeds.newest()
    live = bool(selected) and feeds.of(selected).store.is_live()
    fallback = "monitor" if live and "monitor" in names else names[0]
    return page if page in names else fallback, selected
