"""The command line: what it prints, what it returns, and how it says no. Runs are real processes with a stand-in trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain import cli, doctor, export, report, shapes
from megatrain.config import RunConfig
from megatrain.engine import checkpoint
from megatrain.engine.events import Phase
from megatrain.errors import CheckpointError
from megatrain.runs import supervisor
from megatrain.runs.records import EventRow, RunState, RunStatus, StepRow
from tests.shapes import QWEN_1B5, machine

ROOT = Path(__file__).resolve().parent.parent
FAKE_WORKER = Path(__file__).parent / "runs" / "fake_worker.py"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A workspace whose runs are trained by the stand-in."""
    monkeypatch.setattr(supervisor, "WORKER", (sys.executable, str(FAKE_WORKER)))
    folder = tmp_path / "work space"
    yield folder
    for store in supervisor.list_runs(folder):
        if store.state().is_active:
            supervisor.force_quit(store)


def yaml(folder: Path, **changes: Any) -> str:
    raw = RunConfig().to_dict()
    for key, value in changes.items():
        room, _, name = key.rpartition("__")
        (raw[room] if room else raw)[name] = value
    path = folder / "run.yaml"
    RunConfig.from_dict(raw).save(path)
    return str(path)


def program(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megatrain", *arguments], cwd=ROOT, env={**os.environ, **changes},
                          capture_output=True, text=True, check=False)  # fmt: skip


# ---- wrong use -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [[], ["frob"], ["plan"], ["train", "x.yaml", "--speed", "9"], ["export", "r", "--dtype", "int3"]])
def test_wrong_use_is_explained_by_the_parser(arguments: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m megatrain" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("doctor", "plan", "train", "resume", "export", "verify", "bench"))


def test_bench_has_options_of_its_own(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--help"])
    assert caught.value.code == 0
    assert "usage: python -m megatrain bench" in (text := capsys.readouterr().out)
    assert "--vram-limit-gib" in text


def test_the_program_says_no_without_a_traceback(tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("{colour: blue, precision: fp7}", "utf-8")
    done = program("plan", str(tmp_path / "bad.yaml"))
    assert done.returncode == 2
    assert "colour: unknown key" in done.stderr
    assert "precision: 'fp7'" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_errors_as_json(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "bad.yaml").write_text("{colour: blue, precision: fp7}", "utf-8")
    assert cli.main(["train", str(tmp_path / "bad.yaml"), "--json"]) == 2
    assert [problem["key"] for problem in json.loads(capsys.readouterr().out)["problems"]] == ["colour", "precision"]
    assert cli.main(["resume", "nobody", "--json"]) == 2
    assert "nobody" in json.loads(capsys.readouterr().out)["error"]


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture):
    assert cli.main(["plan", "/nowhere/run.yaml"]) == 2
    assert capsys.readouterr().err == "Error: /nowhere/run.yaml: cannot be read: No such file or directory\n"


def test_a_workspace_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "file").write_text("", "utf-8")
    assert cli.main(["train", yaml(tmp_path), "--workspace", str(tmp_path / "file" / "w")]) == 2
    assert "file" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_fault(tmp_path: Path):
    command = f'"{sys.executable}" -m megatrain doctor --json --workspace "{tmp_path}" | head -c 1'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


# ---- doctor and plan -------------------------------------------------------------------------------------------------
def test_doctor_lists_findings_and_fixes(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    bad = doctor.Finding("PyTorch", doctor.Level.ERROR, "not installed", "PyTorch", "pip install torch")
    good = doctor.Finding("Python", doctor.Level.OK, "3.12", "3.11 or newer")
    monkeypatch.setattr(doctor, "examine", lambda *_: [good, bad])
    assert cli.main(["doctor", "--workspace", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "OK       Python: 3.12" in text
    assert "ERROR    PyTorch: not installed" in text
    assert "fix: pip install torch" in text
    monkeypatch.setattr(doctor, "examine", lambda *_: [good])
    assert cli.main(["doctor", "--workspace", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["findings"][0]["level"] == "ok"
    assert answer["machine"]["cpu_cores"] >= 1


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a computer that need not be read."""
    monkeypatch.setattr(shapes, "resolve", lambda *_: Path())
    monkeypatch.setattr(shapes, "load_shape", lambda *_: QWEN_1B5)
    monkeypatch.setattr("megatrain.hardware.read_machine", lambda _: machine(8, 64))


@pytest.mark.usefixtures("known")
def test_a_plan_in_words(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["plan", yaml(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Qwen2.5-1.5B: 1.54 B parameters in bf16 on cuda:0 (Card). It fits." in text
    assert "16,384 tokens in 1 micro-batch of up to 16,384" in text
    assert "GiB that may be used: weights" in text
    assert "layer008 … head: all in RAM" in text
    assert "17.3 GiB a checkpoint, up to 51.8 GiB of 500 GiB free" in text


@pytest.mark.usefixtures("known")
def test_a_plan_as_json(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["plan", yaml(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_params"] == QWEN_1B5.num_params
    assert answer["plan"]["predicted"]["vram_bytes"] <= answer["budget"]["vram_bytes"]


@pytest.mark.usefixtures("known")
def test_what_does_not_fit_comes_with_what_would(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = yaml(tmp_path, memory__vram_limit_gib=2.0)
    assert cli.main(["plan", path]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "does not fit: it lacks" in shown.err
    assert "memory.vram_limit_gib" in shown.err
    assert cli.main(["plan", path, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["missing_bytes"]["vram"] > 0
    assert answer["suggestions"][0]["key"] == "memory.vram_limit_gib"


# ---- runs ------------------------------------------------------------------------------------------------------------
def test_a_run_is_followed_to_its_end(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["train", yaml(tmp_path, name="short", train__num_steps=5), "--workspace", str(workspace)]) == 0
    text = capsys.readouterr().out
    run = supervisor.list_runs(workspace)[0]
    assert f"Run {run.run_id} in {workspace}" in text
    assert "step 5/5  loss 0.6000  norm 1  learning rate 0.0001" in text
    assert "\nFinished after step 5.\n" in text
    assert run.state().state is RunState.FINISHED


def test_a_failed_run_is_explained(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = yaml(tmp_path, name="fail vram", train__num_steps=50)
    assert cli.main(["train", path, "--workspace", str(workspace), "--json"]) == 1
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["state"] == "failed"
    assert answer["error"]["title"]
    assert "step 3/50" in shown.err
    assert cli.main(["train", path, "--workspace", str(workspace)]) == 1
    assert "Error: " in capsys.readouterr().err


def test_detached_runs_go_on_and_can_be_stopped_and_resumed(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = yaml(tmp_path, name="long", train__num_steps=100_000)
    assert cli.main(["train", path, "--workspace", str(workspace), "--detach", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    store = supervisor.find_run(workspace, answer["run"])
    wait_until(store, RunState.RUNNING)
    assert cli.main(["resume", answer["run"], "--workspace", str(workspace)]) == 2
    assert "Already running" in capsys.readouterr().err
    store.send_command("stop")
    wait_until(store, RunState.STOPPED)
    assert cli.main(["resume", answer["folder"], "--detach"]) == 0
    wait_until(store, RunState.RUNNING)
    store.send_command("stop")
    wait_until(store, RunState.STOPPED)
    assert cli.main(["resume", answer["run"], "--workspace", str(workspace), "--checkpoint", "step-99999999"]) == 2
    assert "step-99999999" in capsys.readouterr().err


def wait_until(store: Any, state: RunState) -> None:
    give_up = time.monotonic() + 60
    while store.state().state is not state:
        assert time.monotonic() < give_up, f"still {store.state()}\n{store.log_tail()}"
        time.sleep(0.05)


FOREGROUND = """
import sys
from megatrain import cli
from megatrain.runs import supervisor
supervisor.WORKER = (sys.executable, sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""


def interrupted(number: signal.Signals, at: Sequence[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of a command in a process of its own, interrupted once at each line that begins with one of `at`, in turn."""
    command = [sys.executable, "-c", FOREGROUND, str(FAKE_WORKER), *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip("\n"))
            if at and line.startswith(at[0]):
                process.send_signal(number)
                at = at[1:]
    assert not at, lines
    return process.returncode, lines


@pytest.mark.skipif(os.name == "nt", reason="signals are sent another way there")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_and_saves(number: signal.Signals, workspace: Path, tmp_path: Path):
    path = yaml(tmp_path, name="long", train__num_steps=100_000)
    code, lines = interrupted(number, ["step "], "train", path, "--workspace", str(workspace))
    assert code == 0
    store = supervisor.list_runs(workspace)[0]
    assert "Stopping after this step, then saving." in lines
    assert any(line.startswith("checkpoint of step") for line in lines)
    assert lines[-1].startswith("Stopped after step")
    assert store.state().state is RunState.STOPPED
    assert store.checkpoints()[0].complete


@pytest.mark.skipif(os.name == "nt", reason="signals are sent another way there")
def test_a_second_interrupt_says_what_is_happening_and_a_third_ends_it_without_saving(workspace: Path, tmp_path: Path):
    path = yaml(tmp_path, name="slow save", train__num_steps=100_000)
    code, lines = interrupted(signal.SIGINT, ["step ", "save", "Still saving"], "train", path, "--workspace", str(workspace))
    assert code == 130
    store = supervisor.list_runs(workspace)[0]
    step = store.state().step
    lost = "Ctrl+C once more ends the run at once, without saving: all that it has trained is lost."
    assert f"Still saving the state after step {step}. {lost}" in lines
    assert lines[-1] == "Forced to quit; steps after the last checkpoint are lost."
    assert store.state().state is RunState.STOPPED
    assert store.checkpoints() == []


@pytest.mark.skipif(os.name == "nt", reason="signals are sent another way there")
def test_an_interrupt_of_a_run_whose_disk_is_full_tries_to_save_again(workspace: Path, tmp_path: Path):
    path = yaml(tmp_path, name="full disk", train__num_steps=100_000)
    code, lines = interrupted(signal.SIGINT, ["step ", "warning: Disk is full"], "train", path, "--workspace", str(workspace))
    assert code == 0
    assert any(line.startswith("Trying to save again. Ctrl+C once more") for line in lines)
    assert any(line.startswith("checkpoint of step") for line in lines)
    assert lines[-1].startswith("Stopped after step")


def test_what_a_second_interrupt_says(tmp_path: Path):
    def said(state: RunState, phase: str, saved: int | None = None) -> str:
        return report.still_busy(RunStatus(state, step=12, phase=Phase(phase)), saved)

    lost = "Ctrl+C once more ends the run at once, without saving: "
    assert said(RunState.STOPPING, "train", 10) == f"Still at step 13, then it saves. {lost}what it trained after step 10 is lost."
    assert said(RunState.STOPPING, "save", 12) == "Still ending. Ctrl+C once more ends the run at once; its state after step 12 is saved."
    assert said(RunState.STARTING, "download") == "Still ending: download. Ctrl+C once more ends the run at once; nothing is trained yet."


# ---- export and verify -----------------------------------------------------------------------------------------------
@pytest.fixture
def trained(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> Any:
    """A run with one checkpoint."""
    assert cli.main(["train", yaml(tmp_path, train__num_steps=100_000), "--workspace", str(workspace), "--detach"]) == 0
    store = supervisor.list_runs(workspace)[0]
    wait_until(store, RunState.RUNNING)
    store.send_command("stop")
    wait_until(store, RunState.STOPPED)
    capsys.readouterr()
    return store


def test_an_export_is_shown_and_recorded(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def write(point: Path, folder: Path, target: Path, dtype: str, progress: Any, chat_template: str) -> export.ExportReport:
        asked.append((point.name, folder, target, dtype, chat_template))
        for done in range(11):
            progress(Phase("export", done, 10, "bytes"))
        return export.ExportReport(str(target), dtype, 5, 1000, ("config.json",), 1.5, True, "Hello.", True, ("A notice.",))

    monkeypatch.setattr(export, "export", write)
    monkeypatch.setattr(shapes, "resolve", lambda *_: tmp_path)
    name = trained.checkpoints()[0].name
    assert cli.main(["export", str(trained.folder), "--dtype", "float32"]) == 0
    assert asked == [(name, tmp_path, trained.folder / "exports" / f"{name}-fp32", "fp32", "")]
    shown = capsys.readouterr()
    assert "It answered: Hello. (and ended by itself)" in shown.out
    assert "A notice." in shown.out
    assert "export 50 %" in shown.err
    states = [event.data["state"] for event in trained.events() if event.kind == "export"]
    assert states == ["running"] * 11 + ["finished"]
    assert cli.main(["export", str(trained.folder), "--target", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "out")
    assert asked[-1][3] == "bf16"
    (trained.folder / "data.json").write_text('{"template": "fallback"}', "utf-8")
    assert cli.main(["export", str(trained.folder)]) == 0
    assert "assistant" in asked[-1][4]
    assert "generation %}" not in asked[-1][4]


def test_a_failed_export_is_recorded(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    def write(*_: Any, **__: Any) -> None:
        raise CheckpointError("block 3 is damaged.", "Choose another checkpoint.")

    monkeypatch.setattr(export, "export", write)
    monkeypatch.setattr(shapes, "resolve", lambda *_: tmp_path)
    assert cli.main(["export", str(trained.folder)]) == 2
    assert "block 3 is damaged" in capsys.readouterr().err
    last = [event.data for event in trained.events() if event.kind == "export"][-1]
    assert last["state"] == "failed"
    assert "block 3" in last["text"]


def test_verify_reads_every_checkpoint(trained: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    found = trained.checkpoints()[0].path
    monkeypatch.setattr(checkpoint, "verify", lambda folder: [])
    assert cli.main(["verify", str(trained.folder)]) == 0
    assert capsys.readouterr().out == f"{found.name}: sound\n"
    monkeypatch.setattr(checkpoint, "verify", lambda folder: [f"{folder.name} is short"])
    assert cli.main(["verify", str(found)]) == 1
    assert "DAMAGED\n  " in capsys.readouterr().out
    assert cli.main(["verify", trained.run_id, "--workspace", str(trained.folder.parent.parent), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["problems"] == [f"{found.name} is short"]


def test_a_real_verification_finds_what_is_wrong(trained: Any, capsys: pytest.CaptureFixture):
    """The stand-in's checkpoints only look like checkpoints."""
    assert cli.main(["verify", str(trained.folder)]) == 1
    assert "DAMAGED" in capsys.readouterr().out


# ---- lines -----------------------------------------------------------------------------------------------------------
def row(**changes: Any) -> StepRow:
    values = {"id": 1, "time_s": 0.0, "step": 12, "loss": 1.84321, "grad_norm": 0.71234, "learning_rate": 1e-5, "num_tokens": 100,
              "trained_tokens": 90, "step_s": 2.0, "tokens_per_s": 8192.4, "epoch": 0.1, "bytes": {}, "waits": {}}  # fmt: skip
    return StepRow(**{**values, **changes})


def test_a_step_in_one_line():
    line = report.step_line(row(), 312, 2.0)
    assert line == "step 12/312  loss 1.8432  norm 0.712  learning rate 1e-05  8,192 tokens/s, 10 min left"
    assert "left" not in report.step_line(row(step=312), 312, 2.0)
    assert report.step_line(row(loss=None), None, 2.0).startswith("step 12  loss not a number")


def test_events_in_one_line():
    def line(kind: str, **data: Any) -> str:
        return report.event_line(EventRow(1, 0.0, kind, data))

    assert line("eval", step=50, loss=1.5) == "held-out loss after step 50: 1.5000"
    assert line("checkpoint", step=50, path="/x", num_bytes=2**30, duration_s=12.0) == "checkpoint of step 50 saved (1.00 GiB in 12 s): /x"
    assert line("notice", level="warning", text="slow disk") == "warning: slow disk"
    assert line("state", state="running") == ""


def test_phases_in_steps_of_ten():
    assert report.phase_line(Phase("download", 47, 100, "bytes")) == "download 40 %"
    assert report.phase_line(Phase("load")) == "load …"


def test_the_workspace_comes_from_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cli.WORKSPACE_VARIABLE, "/data/mine")
    assert cli.default_workspace() == Path("/data/mine")
    monkeypatch.delenv(cli.WORKSPACE_VARIABLE)
    assert str(cli.default_workspace()) == "~/megatrain-workspace"


def test_interrupts_leave_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGINT)
    with report._interrupts() as asked:
        assert signal.getsignal(signal.SIGINT) is not before
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.wait(5)
    assert signal.getsignal(signal.SIGINT) is before


