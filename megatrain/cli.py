"""The command line: python -m megatrain doctor | plan | train | resume | export | verify | bench.

Each command is: parse, one call, print. It works on the YAML that the page saves and on the runs that the page shows.
Exit codes: 0 done, 1 found something wrong, 2 cannot be done as asked, 130 interrupted before it was saved.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig
from megatrain.errors import ConfigError, MegaTrainError, PlanError

DEFAULT_WORKSPACE = "~/megatrain-workspace"
WORKSPACE_VARIABLE = "MEGATRAIN_WORKSPACE"
DONE, WRONG, REFUSED, INTERRUPTED = 0, 1, 2, 130
DTYPES = {"bf16": "bf16", "fp32": "fp32", "bfloat16": "bf16", "float32": "fp32"}  # as people write it -> as precisions are named


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. What a user can mend is printed without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # has options of its own
        return _guarded(lambda: _bench(arguments[1:]), as_json=False)
    options = _parser().parse_args(arguments)
    return _guarded(lambda: _in_workspace(options), options.json)


def _in_workspace(options: argparse.Namespace) -> int:
    try:
        options.workspace = options.workspace.expanduser()
    except RuntimeError as error:
        raise MegaTrainError(f"{options.workspace}: {error}", "Give the workspace by its whole path.") from error
    return options.command(options)


def _guarded(command: Callable[[], int], as_json: bool) -> int:
    try:
        return command()
    except MegaTrainError as error:
        return _print_error(error, as_json)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has enough, as in `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return WRONG
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _print_error(MegaTrainError(f"{what}."), as_json)
    except KeyboardInterrupt:
        return INTERRUPTED


def default_workspace() -> Path:
    """The folder of runs and caches when none is given."""
    return Path(os.environ.get(WORKSPACE_VARIABLE) or DEFAULT_WORKSPACE)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--workspace", type=Path, default=default_workspace(), help=f"folder of runs and caches ({WORKSPACE_VARIABLE})")
    shared.add_argument("--json", action="store_true", help="print JSON")
    parser = argparse.ArgumentParser(prog="python -m megatrain", description="Full-parameter training of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[shared], help=help, description=help)
        added.set_defaults(command=function)
        return added

    doctor = command("doctor", _doctor, "what this computer has, what is missing, and the fix")
    doctor.add_argument("--measure", action="store_true", help="first measure its speed, about 15 s; plans use it from then on")
    plan = command("plan", _plan, "whether a configuration fits, where everything lives, how fast it will be")
    plan.add_argument("config", type=Path, help="YAML file, as the page saves it")
    train = command("train", _train, "train; Ctrl+C stops and saves")
    train.add_argument("config", type=Path, help="YAML file, as the page saves it")
    train.add_argument("--detach", action="store_true", help="start and return; watch it on the page")
    resume = command("resume", _resume, "continue a stopped or crashed run")
    resume.add_argument("run", help="id of a run in the workspace, or its folder")
    resume.add_argument("--checkpoint", help="name of the checkpoint; the newest by default")
    resume.add_argument("--detach", action="store_true", help="start and return; watch it on the page")
    exporting = command("export", _export, "write a checkpoint as a Hugging Face folder")
    exporting.add_argument("run", help="id of a run in the workspace, or its folder")
    exporting.add_argument("--checkpoint", help="name of the checkpoint; the newest by default")
    exporting.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="number format of the weights")
    exporting.add_argument("--to", "--target", dest="target", type=Path, help="folder to write; inside the run by default")
    verify = command("verify", _verify, "compare sizes and checksums of checkpoints with what was written")
    verify.add_argument("path", help="id of a run, its folder, or the folder of one checkpoint")
    command("bench", None, "measure training steps of a named shape on this machine; see bench --help")
    return parser


# ---- commands --------------------------------------------------------------------------------------------------------
def _doctor(options: argparse.Namespace) -> int:
    from megatrain import doctor
    from megatrain.hardware import read_machine

    if options.measure and (failure := doctor.measure(options.workspace)):
        print(f"The speed could not be measured: {failure}", file=sys.stderr)
    machine = read_machine(options.workspace)
    findings = doctor.examine(machine, options.workspace)
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings], "machine": asdict(machine)}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.level.upper():8} {finding.check}: {finding.found}")
            if finding.level is not doctor.Level.OK:
                print(f"{'':8} wanted: {finding.wanted}")
            if finding.fix:
                print(f"{'':8} fix: {finding.fix}")
    return WRONG if any(finding.level is doctor.Level.ERROR for finding in findings) else DONE


def _plan(options: argparse.Namespace) -> int:
    from megatrain import planner, report, shapes
    from megatrain.hardware import read_machine, with_offload

    config = RunConfig.load(options.config)
    shape = shapes.load_shape(shapes.resolve(config.model, options.workspace), config.model.path, options.workspace)
    machine = with_offload(read_machine(options.workspace), options.workspace, config.memory.offload_folder)
    try:
        plan = planner.plan(config, shape, machine)
    except PlanError as error:
        helpful = planner.suggestions(config, shape, machine)
        if options.json:
            changes = [{"text": item.text, "key": item.key, "value": item.value, "plan": asdict(item.plan)} for item in helpful]
            print(json.dumps({"error": error.message, "hint": error.hint, "missing_bytes": error.missing_bytes, "suggestions": changes}))
        else:
            print(f"Error: {error.message}", file=sys.stderr)
            print("\n".join(report.suggestion_lines(helpful)) or error.hint, file=sys.stderr)
        return REFUSED
    limits = planner.budget(config, machine)
    if options.json:
        print(json.dumps({"plan": asdict(plan), "budget": asdict(limits), "num_params": shape.num_params}))
    else:
        print("\n".join(report.plan_lines(config, shape, machine, plan, limits)))
    return DONE


def _train(options: argparse.Namespace) -> int:
    from megatrain.runs import supervisor

    config = RunConfig.load(options.config)
    store = supervisor.create_run(options.workspace, config)
    supervisor.start_worker(store)
    return _started(store, options)


def _resume(options: argparse.Namespace) -> int:
    from megatrain.runs import supervisor

    store = _find_run(options.run, options.workspace)
    supervisor.start_worker(store, resume=True, checkpoint=options.checkpoint)
    return _started(store, options)


def _started(store: Any, options: argparse.Namespace) -> int:
    """Watch the worker to its end, or leave it to itself."""
    from megatrain import report
    from megatrain.runs.records import RunState

    lines = sys.stderr if options.json else sys.stdout
    print(f"Run {store.run_id} in {store.folder}", file=lines, flush=True)
    saved = options.detach or report.follow(store, lambda line: print(line, file=lines, flush=True))
    status = store.state()
    if options.json:
        where = {"run": store.run_id, "folder": str(store.folder)}
        now = {"state": status.state, "step": status.step, "num_steps": status.num_steps}
        print(json.dumps({**where, **now, "error": asdict(status.error) if status.error else None}))
    elif status.error and not options.detach:
        print(f"Error: {status.error.title}. {status.error.text} {status.error.hint}".rstrip(), file=sys.stderr)
    if not saved:
        return INTERRUPTED
    return DONE if status.is_active or status.state in (RunState.FINISHED, RunState.STOPPED, RunState.CREATED) else WRONG


def _export(options: argparse.Namespace) -> int:
    """Write the folder; what happens is also recorded in the run, for the page."""
    from megatrain import export, report, shapes
    from megatrain.runs import supervisor

    store = _find_run(options.run, options.workspace)
    point = supervisor.resume_point(store, options.checkpoint)
    dtype = DTYPES[options.dtype]
    target = (options.target.expanduser() if options.target else store.folder / "exports" / f"{point.name}-{dtype}").absolute()
    progress = report.ExportProgress(store, point.name, target, lambda line: print(line, file=sys.stderr, flush=True))
    with progress.recorded():
        config = RunConfig.load(store.folder / "config.yaml")
        folder = shapes.resolve(config.model, options.workspace)
        written = export.export(point.path, folder, target, dtype, progress, chat_template=_own_template(store.folder))
        progress.finished(written)
    if options.json:
        print(json.dumps(asdict(written)))
    else:
        print("\n".join(report.export_lines(written)))
    return DONE


def _own_template(run_folder: Path) -> str:
    """The chat template that the run trained with, if it was not the tokenizer's own; for other tools, without training's marks."""
    from megatrain.data.templates import FALLBACK_TEMPLATE
    from megatrain.runs.store import load_json

    report = load_json(run_folder / "data.json") or {}
    template = FALLBACK_TEMPLATE if report.get("template") == "fallback" else report.get("chat_template", "")
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", str(template))


def _verify(options: argparse.Namespace) -> int:
    """All files are read. A run: every checkpoint in it, the unfinished ones too."""
    from megatrain.engine import checkpoint

    folder = Path(options.path).expanduser()
    if (folder / checkpoint.MANIFEST).exists() or folder.parent.name == "checkpoints":
        folders = [folder]
    else:
        folders = [found.path for found in _find_run(options.path, options.workspace).checkpoints()]
    results = {path: checkpoint.verify(path) for path in folders}
    if options.json:
        print(json.dumps([{"path": str(path), "sound": not problems, "problems": problems} for path, problems in results.items()]))
    else:
        for path, problems in results.items():
            print(f"{path.name}: {'sound' if not problems else 'DAMAGED'}")
            for problem in problems:
                print(f"  {problem}")
        if not results:
            print("This run has no checkpoints.")
    return WRONG if any(results.values()) else DONE


def _bench(arguments: list[str]) -> int:
    from megatrain import bench

    return bench.main(arguments)


def _find_run(name: str, workspace: Path) -> Any:
    """A run by id, or by folder wherever it lies."""
    from megatrain.runs import supervisor
    from megatrain.runs.store import RunStore

    folder = Path(name).expanduser()
    if folder.is_dir() and (folder / "config.yaml").is_file():
        return RunStore.open(folder.resolve())
    return supervisor.find_run(workspace, name)


def _print_error(error: MegaTrainError, as_json: bool) -> int:
    if as_json:
        problems = [{"key": key, "text": text} for key, text in error.problems] if isinstance(error, ConfigError) else []
        print(json.dumps({"error": error.message, "hint": error.hint, "problems": problems}))
        return REFUSED
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        print("Error: the configuration cannot be used:", file=sys.stderr)
        for key, text in error.problems:
            print(f"  {key}: {text}", file=sys.stderr)
    else:
        print(f"Error: {error.message}", file=sys.stderr)
    if error.hint:
        print(error.hint, file=sys.stderr)
    return REFUSED
