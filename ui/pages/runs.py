"""Runs: every run of the workspace, and for one of them its configuration, checkpoints and what can be done with it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gradio as gr

from megatrain.config import RunConfig
from megatrain.errors import MegaTrainError, RunError
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import delete_run, find_run, start_export, start_worker
from megatrain.units import format_bytes
from ui import draft
from ui.context import Context, checked_run_id
from ui.run_list import EXPORT_TYPES, Reply, RunList
from ui.words import section, text

SCRIPT = Path(__file__).parent.parent / "static" / "runs.js"
ANSWER_S = 0.15  # a deletion that takes longer goes on behind the page
POOL = ThreadPoolExecutor(1, thread_name_prefix="delete")


def build(ctx: Context) -> None:
    """The page: one widget; opening the Monitor and filling the form are the dashboard's."""
    table = run_table(ctx)

    def open_monitor(event: gr.EventData) -> tuple[Any, Any]:
        return ctx.open_page("monitor", checked_run_id(event.run))

    def duplicate(event: gr.EventData) -> tuple[Any, Any]:
        try:
            draft.save_config(ctx.workspace, RunConfig.load(ctx.store(event.run).folder / "config.yaml"))
        except MegaTrainError as error:
            gr.Warning(str(error))
            return gr.skip(), gr.skip()
        return ctx.open_page("new_run")

    table.open(open_monitor, None, ctx.open_outputs, show_progress="hidden", api_visibility="private")
    table.duplicate(duplicate, None, ctx.open_outputs, show_progress="hidden", api_visibility="private")


def run_table(ctx: Context) -> gr.HTML:
    """The list with its filters; a row opens the detail below it. Events: open({run}), duplicate({run})."""
    found = RunList(ctx.feeds)

    def runs(request: Any) -> list[Reply]:
        return found.lines()

    def detail(request: Any) -> Reply:
        return _answered(lambda: found.detail(_asked(request, "run")))

    def act(request: Any) -> Reply:
        return _answered(lambda: carry_out(find_run(ctx.workspace, checked_run_id(_asked(request, "run"))), request))

    return gr.HTML(
        html_template="<div class='run-filters'></div><div class='run-list'></div>", js_on_load=SCRIPT.read_text("utf-8"),
        elem_id="run-table", elem_classes=["runs"], apply_default_css=False, server_functions=[runs, detail, act],
        texts=section("monitor") | section("runs"), states=section("states"), types=list(EXPORT_TYPES),
    )  # fmt: skip


def carry_out(store: RunStore, request: Any) -> Reply:
    """Do what a button of the detail says. Returns at once, with words for the person who pressed it."""
    action, checkpoint = _asked(request, "action"), _asked(request, "checkpoint")
    name = checkpoint if isinstance(checkpoint, str) and checkpoint else None
    if action == "resume":
        start_worker(store, resume=True, checkpoint=name)
    elif action == "start":
        start_worker(store)
    elif action == "export":
        dtype = _asked(request, "type")
        if dtype not in EXPORT_TYPES or name is None:
            raise RunError(text("runs.export_choose"))
        start_export(store, name, dtype)
    elif action == "delete":
        return {"said": delete(store)}
    else:
        raise RunError(text("runs.unknown_action"))
    return {"said": ""}


def delete(store: RunStore) -> str:
    """Delete a run; what takes long goes on in a thread, for the folder is out of the list at once."""
    if store.is_live():
        raise RunError(text("runs.why_live"))
    pending = POOL.submit(delete_run, store)
    try:
        return text("runs.deleted", size=format_bytes(pending.result(ANSWER_S)))
    except TimeoutError:
        return text("runs.deleting")
    except OSError as error:
        raise RunError(text("runs.delete_failed", reason=error.strerror or str(error))) from error


def _answered(work: Any) -> Reply:
    """The answer, or the reason in words: a server function that raises says nothing to the page."""
    try:
        return work()
    except MegaTrainError as error:
        return {"error": str(error)}


def _asked(request: object, key: str) -> Any:
    return request.get(key) if isinstance(request, dict) else None
