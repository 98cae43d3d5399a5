"""gr.HTML components with their own JavaScript (static/*.js) and the server functions that it calls.

Their templates hold no values: the scripts build elements from text, so nothing from a run can become markup. Server functions can
be called by anyone who reaches the port, so each checks what it is handed and answers an error in words.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from megatrain.errors import MegaTrainError
from megatrain.runs.supervisor import find_run, list_runs
from ui import charts, controls, fixes, view
from ui.context import checked_run_id
from ui.feed import Feeds, RunFeed
from ui.words import section, text

STATIC = Path(__file__).parent / "static"
STRIP_ACTIONS = ("pause", "continue", "stop", "resume")
Reply = dict[str, Any]


def _asked(request: object, key: str) -> Any:
    return request.get(key) if isinstance(request, dict) else None


def _patient(answer: Callable[[Any], Reply]) -> Callable[[Any], Reply]:
    """A server function that answers {"again": why} while a run cannot be read: it is being deleted or moved, or its record is locked."""

    @functools.wraps(answer)
    def asked(request: Any) -> Reply:
        try:
            return answer(request)
        except (MegaTrainError, OSError) as error:
            return {"again": str(error)}

    return asked


def acting(feeds: Feeds) -> Callable[[Any], Reply]:
    """The server function behind the buttons: act({"run", "action"}) answers {} or {"error": words}."""

    def act(request: Any) -> Reply:
        try:
            store = find_run(feeds.workspace, checked_run_id(_asked(request, "run")))
            controls.act(store, str(_asked(request, "action")))
        except MegaTrainError as error:
            return {"error": str(error)}
        return {}

    return act


def status_strip(feeds: Feeds) -> gr.HTML:
    """One line above every page about the live run, or the selected one. Value: {"run": id}. Event: open({run})."""

    @_patient
    def status(request: Any) -> Reply:
        feed = _feed(feeds, _asked(request, "run"), live_first=True)
        if feed is None:
            words = {"word": text("shell.no_run"), "name": text("shell.no_run_hint"), "title": text("shell.title")}
            return {"run": "", "tone": "idle", "facts": [], "progress": None, "buttons": [], "idle": True, **words}
        rows, now = feed.rows(), time.time()
        found = controls.buttons(rows, feed.num_checkpoints(), now)
        buttons = [button for button in found if button["action"] in STRIP_ACTIONS]
        return {**view.strip(rows, now), "buttons": buttons, "idle": not rows.status.is_active}

    texts = section("shell") | section("monitor")
    return _widget("strip.js", "<div class='strip'></div>", [status, acting(feeds)], texts, value={"run": ""}, elem_id="status-strip")


def run_head(feeds: Feeds) -> gr.HTML:
    """The top of the monitor page: which run, its buttons, its stages and numbers. Hears the page's poll. Event: pick({run})."""

    @_patient
    def runs(request: Any) -> Reply:
        return {"runs": [_listed(feeds.of(store.run_id)) for store in list_runs(feeds.workspace)]}

    def diagnostics(request: Any) -> Reply:
        try:
            return {"text": fixes.diagnostics(feeds.of(checked_run_id(_asked(request, "run"))))}
        except MegaTrainError as error:
            return {"error": str(error)}

    template = (
        "<div class='nothing mt-empty' hidden></div><div class='something'><div class='top'></div><div class='notes'></div>"
        "<div class='why'></div><ol class='chain'></ol><div class='numbers'></div></div>"
    )
    return _widget("head.js", template, [runs, diagnostics, acting(feeds)], section("monitor"), elem_id="run-head")


def live_charts(feeds: Feeds) -> gr.HTML:
    """The charts of a run, and the page's only poll. Value: {"run": id}."""

    @_patient
    def poll(request: Any) -> Reply:
        feed = _feed(feeds, _asked(request, "run"))
        return monitor_reply(feed, request, time.time()) if feed else {"run": "", "idle": True}

    template = "<div class='chart-bar'></div><div class='chart-grid'></div>"
    names = list(charts.CHARTS)
    return _widget("charts.js", template, [poll], section("charts"), value={"run": ""}, names=names, elem_id="live-charts")


def log_view() -> gr.HTML:
    """The end of worker.log; hears the page's poll."""
    template = "<div class='log-bar'></div><div class='log-body'></div>"
    return _widget("log.js", template, [], section("monitor"), elem_id="log-view")


def event_list() -> gr.HTML:
    """What happened in the run; hears the page's poll."""
    return _widget("events.js", "<div class='events'></div>", [], section("monitor"), elem_id="event-view")


def _widget(file: str, template: str, functions: list[Callable[[Any], Any]], texts: dict[str, str], **properties: Any) -> gr.HTML:
    """A gr.HTML with the script `static/file`. No subclass: gradio would write a stub beside the source of each."""
    code = (STATIC / file).read_text("utf-8")
    return gr.HTML(
        html_template=template, js_on_load=code, server_functions=functions, texts=texts, apply_default_css=False, **properties
    )  # fmt: skip


def monitor_reply(feed: RunFeed, request: Any, now: float) -> Reply:
    """Everything that the monitor page shows; figures and events only when they differ from what the page has `seen`."""
    rows, options, count = feed.rows(), charts.ChartOptions.parse(request), feed.num_checkpoints()
    state = rows.status.state
    reply: Reply = {
        "run": rows.run_id, "state": str(state), "word": text(f"states.{state}"), "tone": view.tone(state), "chips": view.chips(rows),
        "buttons": controls.buttons(rows, count, now), "pending": controls.pending_words(rows), "error": controls.explanation(rows, count),
        "phases": view.phases(rows), "numbers": view.numbers(rows, now), "idle": not rows.status.is_active, "seen": rows.seen,
    }  # fmt: skip
    offset = _asked(request, "log_offset")
    reply["log"] = feed.log(offset if isinstance(offset, int) else -1)
    if _asked(request, "seen") != rows.seen:
        reply |= {"figures": charts.figures(rows, options), "events": view.events(rows)}
    return reply


def _feed(feeds: Feeds, run_id: object, live_first: bool = False) -> RunFeed | None:
    """The feed of the run asked for, else of the live or newest one; None without runs. `live_first`: a run that is over gives way."""
    try:
        feed = feeds.of(checked_run_id(run_id))
    except MegaTrainError:
        feed = None
    if feed is not None and (not live_first or feed.store.is_live()):
        return feed
    newest = feeds.newest()
    other = feeds.of(newest) if newest else None
    return other if feed is None or (other is not None and other.store.is_live()) else feed


def _listed(feed: RunFeed) -> Reply:
    status = feed.store.state()
    started = time.localtime(status.started_s or status.created_s or 0)
    return {"run": feed.store.run_id, "name": feed.name(), "started": time.strftime("%b %d %H:%M", started)}
