"""Rows -> words: what is known is said with its unit, what is not is an en dash."""

import time

import pytest

from megatrain.engine.events import Phase
from megatrain.plan import Predicted
from megatrain.runs.records import RunState
from megatrain.units import GIB
from tests.ui.rows_of_a_run import START, run_rows
from ui import view


def number(rows, key, now=START):
    return next(item for item in view.numbers(rows, now) if item["key"] == key)


def state_event(state, seconds):
    return {"kind": "state", "state": state, "time_s": START + seconds}


RUNNING = state_event("running", 0)


def test_time_left_is_hidden_in_the_first_ten_steps():
    assert view.seconds_left(run_rows(10, events=[RUNNING])) is None
    assert number(run_rows(10, events=[RUNNING]), "left") == {"key": "left", "value": "–", "detail": "known after 10 steps"}
    assert view.seconds_left(run_rows(11, events=[RUNNING])) == pytest.approx(989 * 2.0)


def test_time_left_names_the_clock_time_of_the_end():
    shown = number(run_rows(100, step_s=2.0, num_steps=1900, events=[RUNNING]), "left")
    assert shown == {"key": "left", "value": "1 h", "detail": "ends 13:00"}


def test_an_end_on_another_day_names_the_day():
    assert view.clock(3600 * 13, START) == "Wed 01:00"


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED, RunState.CRASHED])
def test_no_time_left_for_a_run_that_is_over(state):
    rows = run_rows(100, state=state, events=[RUNNING])
    assert view.seconds_left(rows) is None
    assert number(rows, "left")["detail"] == "trained for 3 min 20 s"


def test_no_time_left_without_a_known_end():
    assert view.seconds_left(run_rows(100, num_steps=None, events=[RUNNING])) is None


def test_time_left_follows_the_latest_hundred_steps():
    rows = run_rows(400, step_s=2.0, num_steps=401, events=[RUNNING])
    rows.steps["time_s"][:200] *= 0.999  # long ago it was slower
    assert view.seconds_left(rows) == pytest.approx(2.0)


def test_a_pause_does_not_count_into_the_time_left():
    rows = run_rows(60, step_s=2.0, num_steps=120, events=[RUNNING, state_event("paused", 61), state_event("running", 3661)])
    rows.steps["time_s"][30:] += 3600
    assert view.seconds_left(rows) == pytest.approx(60 * 2.0)


def test_a_pause_that_lasts_does_not_count_either():
    rows = run_rows(60, num_steps=120, state=RunState.PAUSED, events=[RUNNING, state_event("paused", 121)])
    assert view.seconds_left(rows) == pytest.approx(60 * 2.0)


def test_loss_trend():
    assert view.loss_trend(run_rows(0)) == (pytest.approx(float("nan"), nan_ok=True), "")
    assert view.loss_trend(run_rows(5))[1] == ""
    assert view.loss_trend(run_rows(200))[1] == "falling"
    assert view.loss_trend(run_rows(200, losses=[1 + i / 100 for i in range(200)]))[1] == "rising"
    assert view.loss_trend(run_rows(200, losses=[1.5 + 0.05 * (-1) ** i for i in range(200)]))[1] == "steady"
    assert view.loss_trend(run_rows(30, losses=[None] * 30))[1] == ""


def test_numbers_without_a_gpu_say_so():
    assert number(run_rows(20), "vram") == {"key": "vram", "value": "–", "detail": "No GPU in this run"}
    assert number(run_rows(20), "bus") == {"key": "bus", "value": "–", "detail": "No GPU in this run"}


def test_memory_in_gib_against_the_predicted_peak():
    used = {"process_vram_bytes_max": 5.25 * GIB, "gpu0_vram_used_bytes_max": 7 * GIB, "worker_ram_bytes_max": 17 * GIB}
    telemetry = [{"time_s": START, **used}]
    rows = run_rows(20, has_gpu=True, telemetry=telemetry, predicted=Predicted(vram_bytes=6 * GIB, ram_bytes=18 * GIB, tokens_per_s=1200.0))
    assert number(rows, "vram") == {"key": "vram", "value": "5.25 GiB", "detail": "predicted peak 6.00 GiB"}
    assert number(rows, "ram")["value"] == "17.0 GiB"
    assert number(rows, "speed") == {"key": "speed", "value": "1,000", "detail": "predicted 1,200"}


def test_vram_falls_back_to_the_card_where_the_process_cannot_be_read():
    rows = run_rows(20, has_gpu=True, telemetry=[{"time_s": START, "gpu0_vram_used_bytes_max": 7 * GIB}])
    assert number(rows, "vram")["value"] == "7.00 GiB"


def test_the_bus_is_measured_or_else_counted_and_says_which():
    moved = number(run_rows(20, has_gpu=True), "bus")
    assert moved == {"key": "bus", "value": "↓ 2.00 ↑ 1.00", "unit": "GB/s", "detail": "moved by training"}
    telemetry = [{"time_s": START, "gpu0_pcie_down_bytes_per_s_mean": 20e9, "gpu0_pcie_up_bytes_per_s_mean": 10e9}]
    measured = number(run_rows(20, has_gpu=True, telemetry=telemetry), "bus")
    assert (measured["value"], measured["detail"]) == ("↓ 20.0 ↑ 10.0", "measured on the bus")


def statuses(rows):
    return [link["status"] for link in view.phases(rows)]


def phase(name, done=0.0, total=0.0, unit=""):
    return Phase(name, done, total, unit)


def test_the_first_check_stands_before_the_download():
    assert statuses(run_rows(state=RunState.STARTING, phase=phase("check"))) == ["now", *["todo"] * 5]
    later = {"tokenise": {"name": "tokenise", "time_s": START}}
    assert statuses(run_rows(state=RunState.STARTING, phase=phase("check"), phases=later)) == ["done", "done", "now", *["todo"] * 3]


def test_compiling_has_a_link_where_something_is_compiled():
    assert len(statuses(run_rows(state=RunState.RUNNING, phase=phase("train")))) == 6
    assert statuses(run_rows(state=RunState.RUNNING, phase=phase("compile", 0, 10, "steps")))[3:] == ["done", "now", "todo", "todo"]
    phases = {"compile": {"name": "compile", "time_s": START}}
    assert statuses(run_rows(20, phase=phase("compile"), phases=phases))[3:] == ["done", "done", "now", "todo"]


def test_a_download_shows_bytes():
    first = view.phases(run_rows(state=RunState.STARTING, phase=phase("download", GIB, 4 * GIB, "bytes")))[0]
    assert (first["text"], first["fraction"]) == ("1.00 GiB / 4.00 GiB", 0.25)
    unknown = view.phases(run_rows(state=RunState.STARTING, phase=phase("download")))[0]
    assert (unknown["text"], unknown["fraction"]) == ("", None)


def test_training_shows_its_steps_also_while_it_evaluates():
    for name in ("train", "evaluate"):
        train = view.phases(run_rows(250, phase=phase(name), step=250))[4]
        assert (train["status"], train["text"], train["fraction"]) == ("now", "250 / 1,000", 0.25)


def test_steps_after_a_saving_mean_training():
    phases = {"save": {"name": "save", "time_s": START + 1}}
    assert statuses(run_rows(20, phase=phase("save"), phases=phases))[4:] == ["now", "todo"]


def test_the_chain_of_ended_runs():
    assert statuses(run_rows(20, state=RunState.FINISHED, phase=phase("save"))) == ["done"] * 6
    assert statuses(run_rows(20, state=RunState.FAILED, phase=phase("train")))[4:] == ["failed", "todo"]
    assert statuses(run_rows(20, state=RunState.STOPPED, phase=phase("train")))[4:] == ["ended", "todo"]
    assert statuses(run_rows(state=RunState.CREATED)) == ["todo"] * 6


def test_the_strip_and_the_title_of_the_tab():
    shown = view.strip(run_rows(620, losses=[1.84] * 620, events=[RUNNING]), START)
    assert shown["title"] == "62% · 1.840 · MegaTrain"
    assert shown["facts"][:3] == ["step 620 of 1,000", "loss 1.840", "1,000 tokens/s"]
    assert shown["facts"][3].startswith("12 min left (ends 12:1")
    over = view.strip(run_rows(620, losses=[1.84] * 620, state=RunState.FAILED), START)
    assert over["title"] == "Failed · 1.840 · MegaTrain"
    assert over["facts"] == ["step 620 of 1,000", "loss 1.840"]


def test_every_state_has_its_word():
    for state in RunState:
        assert view.strip(run_rows(state=state), START)["word"]


def test_events_newest_first_in_words():
    happened = [
        RUNNING,
        {"kind": "eval", "step": 50, "loss": 1.9, "time_s": START + 1},
        {"kind": "checkpoint", "step": 1200, "num_bytes": 2 * GIB, "duration_s": 31.0, "time_s": START + 2},
        {"kind": "notice", "level": "warning", "text": "the <b>disk</b> is slow", "time_s": START + 3},
        {"kind": "ended", "reason": "finished", "step": 3, "time_s": START + 4},
        {"kind": "state", "state": "failed", "reason": "no space", "time_s": START + 5},
    ]
    shown = [(event["text"], event["tone"]) for event in view.events(run_rows(events=happened))]
    assert shown == [
        ("Failed: no space", "bad"), ("the <b>disk</b> is slow", "warn"), ("Checkpoint of step 1,200: 2.00 GiB in 31 s", "ok"),
        ("Held-out loss 1.900 at step 50", "idle"), ("Running", "ok"),
    ]  # fmt: skip
    assert view.events(run_rows(events=happened))[-1]["time"] == time.strftime("%H:%M:%S", time.localtime(START))
