"""gr.HTML components with their own JavaScript (static/*.js) and, where they need data, one server function each.

Their templates hold no values: the scripts build elements from text, so nothing from a run can become markup. Server functions can
be called by anyone who reaches the port, so each checks what it is handed and answers an error in words.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from megatrain.errors import MegaTrainError
from megatrain.runs.supervisor import find_run, list_runs
from ui import charts, controls, view
from ui.context import checked_run_id
from ui.feed import Feeds, RunFeed
from ui.words import section, text

STATIC = Path(__file__).parent / "static"
STRIP_ACTIONS = ("pause", "continue", "stop", "resume")
Reply = dict[str, Any]


def script(name: str) -> str:
    """The JavaScript of a widget. Each runs in a function of its own; names do not meet."""
    return (STATIC / name).read_text("utf-8")


def _asked(request: object, key: str) -> Any:
    return request.get(key) if isinstance(request, dict) else None


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


class StatusStrip(gr.HTML):
    """One line above every page about the selected run, or the live one. Event: open({run})."""

    def __init__(self, feeds: Feeds) -> None:
        def status(request: Any) -> Reply:
            feed = _feed(feeds, _asked(request, "run"))
            if feed is None:
                words = {"word": text("shell.no_run"), "name": text("shell.no_run_hint"), "title": text("shell.title")}
                return {"run": "", "tone": "idle", "facts": [], "progress": None, "buttons": [], "idle": True, **words}
            rows, now = feed.rows(), time.time()
            found = controls.buttons(rows, feed.num_checkpoints(), now)
            buttons = [button for button in found if button["action"] in STRIP_ACTIONS]
            return {**view.strip(rows, now), "buttons": buttons, "idle": not rows.status.is_active}

        super().__init__(
            value={"run": ""}, elem_id="status-strip", html_template="<div class='strip'></div>", js_on_load=script("strip.js"),
            server_functions=[status, acting(feeds)], texts=section("shell") | section("monitor"),
        )  # fmt: skip


class RunHead(gr.HTML):
    """The top of the monitor page. Hears the page's poll. Event: pick({run})."""

    TEMPLATE = (
        "<div class='nothing mt-empty' hidden></div><div class='something'><div class='top'></div><div class='notes'></div>"
        "<div class='why'></div><ol class='chain'></ol><div class='numbers'></div></div>"
    )

    def __init__(self, feeds: Feeds) -> None:
        def runs(request: Any) -> list[Reply]:
            return [_listed(feeds.of(store.run_id)) for store in list_runs(feeds.workspace)]

        super().__init__(
            html_template=self.TEMPLATE, js_on_load=script("head.js"), elem_classes=["run-head"],
            server_functions=[runs, acting(feeds)], texts=section("monitor"),
        )  # fmt: skip


class LiveCharts(gr.HTML):
    """The charts of a run and the page's only poll; set its value to {"run": id}."""

    TEMPLATE = "<div class='chart-bar'></div><div class='chart-grid'></div>"

    def __init__(self, feeds: Feeds) -> None:
        def poll(request: Any) -> Reply:
            feed = _feed(feeds, _asked(request, "run"), fall_back=False)
            return monitor_reply(feed, request, time.time()) if feed else {"run": "", "idle": True}

        super().__init__(
            value={"run": ""}, html_template=self.TEMPLATE, js_on_load=script("charts.js"), elem_classes=["live-charts"],
            server_functions=[poll], texts=section("charts"), names=list(charts.CHARTS),
        )  # fmt: skip


class LogView(gr.HTML):
    """The end of worker.log; hears the page's poll."""

    def __init__(self) -> None:
        template = "<div class='log-bar'></div><div class='log-body'></div>"
        super().__init__(html_template=template, js_on_load=script("log.js"), elem_classes=["log-view"], texts=section("monitor"))


class EventList(gr.HTML):
    """What happened in the run; hears the page's poll."""

    def __init__(self) -> None:
        template = "<div class='events'></div>"
        super().__init__(html_template=template, js_on_load=script("events.js"), elem_classes=["event-view"], texts=section("monitor"))


def monitor_reply(feed: RunFeed, request: Any, now: float) -> Reply:
    """Everything that the monitor page shows; figures and events only when they differ from what the page has `seen`."""
    rows, options, count = feed.rows(), charts.ChartOptions.parse(request), feed.num_checkpoints()
    state = rows.status.state
    reply: Reply = {
        "run": rows.run_id, "state": str(state), "word": text(f"states.{state}"), "tone": view.tone(state), "chips": view.chips(rows),
        "buttons": controls.buttons(rows, count, now), "pending": controls.pending_words(rows), "error": controls.explanation(rows, count),
        "phases": view.phases(rows), "numbers": view.numbers(rows, now), "idle": not rows.status.is_active, "seen": rows.seen,
    }  # fmt: skip
    offset = _asked(request, "log")
    reply["log"] = feed.log(offset if isinstance(offset, int) else -1)
    if _asked(request, "seen") != rows.seen:
        reply |= {"figures": charts.figures(rows, options), "events": view.events(rows)}
    return reply


def _feed(feeds: Feeds, run_id: object, fall_back: bool = True) -> RunFeed | None:
    """The feed of the run asked for, else of the live or newest run; None when there is none."""
    try:
        return feeds.of(checked_run_id(run_id))
    except MegaTrainError:
        newest = feeds.newest() if fall_back else ""
        return feeds.of(newest) if newest else None


def _listed(feed: RunFeed) -> Reply:
    status = feed.store.state()
    return {"run": feed.store.run_id, "name": feed.name(), "word": text(f"states.{status.state}")}
