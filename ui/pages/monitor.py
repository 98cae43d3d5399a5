"""Watch a run: its stages, six numbers, charts, events and log; and act on it."""

from typing import Any

import gradio as gr

from ui.context import Context, checked_run_id
from ui.widgets import event_list, live_charts, log_view, run_head


def build(ctx: Context) -> None:
    """The page. Its widgets hear one poll, which the charts own."""
    head = run_head(ctx.feeds)
    live = live_charts(ctx.feeds)
    with gr.Row(elem_classes=["monitor-foot"]):
        event_list()
        log_view()

    def pick(event: gr.EventData) -> Any:
        return checked_run_id(event.run)

    head.pick(pick, None, ctx.run, show_progress="hidden", api_visibility="private")
    ctx.run.change(None, ctx.run, live, js="run => ({run})")
