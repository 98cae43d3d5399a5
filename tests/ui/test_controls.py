"""Buttons with their consequences, and cards with a way out."""

import pytest

from megatrain.errors import RunError
from megatrain.runs.diagnose import Explanation
from megatrain.runs.records import RunState
from tests.ui.fake_runs import FakeRun
from tests.ui.rows_of_a_run import START, run_rows
from ui import controls, fixes
from ui.feed import RunFeed

CHECKPOINT = {"kind": "checkpoint", "step": 100, "num_bytes": 3 * 1024**3, "duration_s": 38.0, "time_s": START}


def offered(rows, checkpoints=0, now=START):
    return {button["action"]: button for button in controls.buttons(rows, checkpoints, now)}


def test_a_running_training_can_be_paused_saved_and_stopped():
    found = offered(run_rows(112, events=[CHECKPOINT]))
    assert list(found) == ["pause", "checkpoint", "stop", "stop_discard"]
    assert all(button["enabled"] for button in found.values())
    assert found["stop"]["ask"] == "Writes a checkpoint after this step (about 38 s, 3.00 GiB); you can resume from it."
    assert found["stop_discard"]["ask"] == "Loses 12 steps: the newest checkpoint is of step 100."


def test_without_a_checkpoint_stopping_without_saving_loses_all():
    assert offered(run_rows(1500))["stop_discard"]["ask"] == "Loses all 1,500 steps: there is no checkpoint yet."


def test_a_disabled_button_says_why():
    starting = offered(run_rows(state=RunState.STARTING))
    assert not starting["pause"]["enabled"]
    assert starting["pause"]["why"] == "Possible once training has begun."
    assert starting["stop"]["enabled"]
    pending = offered(run_rows(5, pending_command="pause"))
    assert pending["checkpoint"]["why"] == "Waits until the last request is answered."
    stopping = offered(run_rows(5, pending_command="stop"))
    assert {button["why"] for button in stopping.values()} == {"The run is stopping."}


def test_a_paused_run_continues():
    assert list(offered(run_rows(5, state=RunState.PAUSED)))[0] == "continue"


@pytest.mark.parametrize(("rows", "asked"), [
    (run_rows(5, state=RunState.STOPPING, since_s=START), START),
    (run_rows(5, pending_command="stop", pending_since_s=START), START),
])  # fmt: skip
def test_force_quit_is_offered_after_two_minutes_without_an_answer(rows, asked):
    assert "force_quit" not in offered(rows, now=asked + 119)
    assert offered(rows, now=asked + 121)["force_quit"]["ask"].startswith("The run has not answered for two minutes.")


def test_a_slow_pause_is_no_reason_to_force_anything():
    assert "force_quit" not in offered(run_rows(5, pending_command="pause", pending_since_s=START), now=START + 1000)


def test_runs_that_are_over():
    assert offered(run_rows(5, state=RunState.FINISHED), 1).keys() == {"open_runs"}
    assert offered(run_rows(5, state=RunState.STOPPED), 1).keys() == {"resume", "open_runs"}
    assert offered(run_rows(5, state=RunState.STOPPED))["resume"]["why"] == "There is no checkpoint to go on from."
    assert offered(run_rows(state=RunState.CREATED)).keys() == {"start"}


def test_the_pending_wish_is_shown():
    assert controls.pending_words(run_rows(412, pending_command="stop")).startswith("Stop is requested; it happens after step 413")
    assert controls.pending_words(run_rows(412)) == ""
    assert controls.pending_words(run_rows(412, state=RunState.STOPPING))


def ways(action, checkpoints, state=RunState.FAILED):
    error = Explanation("It failed", "Because.\nLast lines of the log:\nTraceback", "Do this.", action)
    card = controls.explanation(run_rows(5, state=state, error=error), checkpoints)
    assert (card["text"], card["details"]) == ("Because.", "Last lines of the log:\nTraceback")
    return [button["action"] for button in card["buttons"]]


def test_a_card_offers_the_fix_first():
    assert ways("halve_learning_rate", 1) == ["halve_learning_rate", "resume"]
    assert ways("lower_vram", 0) == ["start"]
    assert ways("choose_data", 0) == ["open_new_run", "start"]
    assert ways("resume", 2, RunState.CRASHED) == ["resume"]
    assert ways("delete", 0, RunState.DAMAGED) == ["open_runs"]


def test_a_run_that_is_well_has_no_card():
    assert controls.explanation(run_rows(5), 1) is None


def test_fixes_change_the_configuration_of_the_run(tmp_path):
    run = FakeRun(tmp_path)
    before = RunFeed(run.store).rows()
    fixes.apply(run.store, "halve_learning_rate")
    fixes.apply(run.store, "lower_ram")
    after = RunFeed(run.store).rows().config
    assert after.train.learning_rate == before.config.train.learning_rate / 2
    assert after.memory.ram_limit_gib == pytest.approx(18 * 0.85)
    fixes.apply(run.store, "lower_ram")
    assert RunFeed(run.store).rows().config.memory.ram_limit_gib == pytest.approx(18 * 0.85**2, abs=0.01)


def test_a_limit_cannot_be_lowered_without_a_plan(tmp_path):
    run = FakeRun(tmp_path)
    (run.folder / "plan.json").unlink()
    with pytest.raises(RunError, match="no plan"):
        fixes.apply(run.store, "lower_vram")


def test_diagnostics_hold_what_helps_and_no_secret(tmp_path):
    run = FakeRun(tmp_path).start(20).train(20)
    (run.folder / "worker.log").write_text("loading with hf_abcdefghijklmnop\n", "utf-8")
    run.state(RunState.FAILED, error={"title": "It failed", "text": "Because.", "hint": "", "action": ""})
    text = fixes.diagnostics(RunFeed(run.store))
    assert "It failed" in text
    assert "learning_rate: 1.0e-05" in text
    assert "torch 2." in text
    assert "hf_abcdef" not in text


def test_commands_reach_the_run_and_unknown_ones_are_refused(tmp_path):
    run = FakeRun(tmp_path).start()
    controls.act(run.store, "pause")
    assert run.store.state().pending_command == "pause"
    with pytest.raises(RunError, match="no command"):
        controls.act(run.store, "rm -rf")
    run.close()
