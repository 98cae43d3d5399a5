"""The look that the Data page shows: which data is open is a file in the workspace; the processes that read it are here.

Opening and counting take long, so each is a job in a thread that waits for a process of its own; handlers only ask how
far it is. A restarted dashboard finds the file and opens the same data again. Processes that nobody has asked for a while
are ended, and started again by the next question.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig
from megatrain.data.preview import Preview
from megatrain.engine.events import Phase
from megatrain.errors import ConfigError, DataError, MegaTrainError
from megatrain.runs.model_source import CancelledError, resolve_model
from ui import draft, form
from ui.background import Answer, Background
from ui.data_fields import LOOK_KEYS
from ui.words import text

NAME = "look.json"
DRAFT = "data_draft.yaml"  # the page's form, opened or not
IDLE_S = 600.0  # a process of a look holds about 300 MB
GRACE_S = 3.0  # for a process that counts to end by itself
SOON_S = 0.1  # a handler waits this long for an answer that is nearly there


@dataclass(frozen=True)
class Wish:
    """What the page was asked to show. `counts` is False after the counting was cancelled."""

    config: RunConfig
    counts: bool = True


def read_wish(workspace: Path) -> Wish | None:
    """None when no data is open."""
    try:
        raw = json.loads((workspace / NAME).read_text("utf-8"))
        return Wish(RunConfig.from_dict(raw["config"]), raw["counts"] is True)
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None


def write_wish(workspace: Path, wish: Wish) -> None:
    """The page is asked to show this. OSError when the workspace cannot be written."""
    draft.write(workspace, NAME, json.dumps({"config": wish.config.to_dict(), "counts": wish.counts}))


@dataclass
class Job:
    """Something that takes long. stage: running, done (with its `value`), failed (with its `error`) or stopped."""

    stage: str = "running"
    done: float = 0
    total: float = 0
    unit: str = ""
    value: Any = None
    error: MegaTrainError | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def note(self, done: float, total: float, unit: str = "rows") -> None:
        self.done, self.total, self.unit = done, total, unit

    def cancel(self) -> None:
        self.stop.set()
        if self.stage == "running":
            self.stage = "stopped"

    def run(self, work: Callable[["Job"], Any]) -> None:
        """Does the work and keeps what came of it; what comes after `cancel` counts no more."""
        try:
            value = work(self)
            if not self.stop.is_set():
                self.value, self.stage = value, "done"
        except (MegaTrainError, CancelledError, OSError) as error:
            self._fail(error if isinstance(error, MegaTrainError) else DataError(str(error)))
        finally:
            if self.stage == "running":  # a fault of ours, which the thread reports
                self._fail(DataError(text("data.broke"), text("data.broke_hint")))

    def _fail(self, error: MegaTrainError) -> None:
        if not self.stop.is_set():
            self.error, self.stage = error, "failed"


class Look:
    """Rows, tokens, search and figures of one configuration."""

    def __init__(self, workspace: Path, wish: Wish) -> None:
        self.workspace, self.config = workspace, wish.config
        self.id = hashlib.sha256(json.dumps(wish.config.to_dict()).encode()).hexdigest()[:16]
        self.opened_at = 0.0
        self.opening = Job()
        self.counting: Job | None = None if wish.counts else Job("stopped")
        self._questions = Background(workers=1, keep=32)
        self._lock = threading.Lock()
        self._used = time.monotonic()
        self._folder: Path | None = None
        self._preview: Preview | None = None
        self._counter: Preview | None = None
        self._start(self.opening, self._open)

    def wake(self) -> None:
        """Somebody looks: what was put to sleep, or has died, is opened again; figures begin once the data is open."""
        with self._lock:
            self._used = time.monotonic()
            if self.opening.stage == "done" and (self._preview is None or not self._preview.is_alive):
                self._drop_preview()
                self.opening = Job()
                self._start(self.opening, self._open)
            elif self.opening.stage == "done" and self.counting is None and self._folder is not None:
                self._start_counting()

    def count(self) -> None:
        """Count, after it was cancelled or has failed."""
        with self._lock:
            if self.opening.stage == "done" and self._folder is not None and (self.counting is None or self.counting.stage != "running"):
                self._start_counting()

    def cancel(self) -> None:
        """Nothing is being opened or counted any more; rows that are open stay."""
        with self._lock:
            self.opening.cancel()
            if self.counting is not None:
                self.counting.cancel()
            elif self.opening.stage == "done":
                self.counting = Job("stopped")
            if self._counter is not None:
                timer = threading.Timer(GRACE_S, self._counter.close)
                timer.daemon = True
                timer.start()

    def close(self) -> None:
        """No process is left."""
        self.cancel()
        with self._lock:
            self._drop_preview()
            if self._counter is not None:
                self._counter.close()

    def row(self, number: int) -> Answer[dict[str, Any]]:
        return self._ask(("row", number), lambda preview: preview.rows(number - 1, 1))

    def tokens(self, number: int) -> Answer[dict[str, Any]]:
        return self._ask(("tokens", number), lambda preview: preview.tokens(number))

    def search(self, words: str, start: int) -> Answer[dict[str, Any]]:
        return self._ask(("search", words, start), lambda preview: preview.search(words, start))

    def _ask(self, question: tuple[Any, ...], work: Callable[[Preview], dict[str, Any]]) -> Answer[dict[str, Any]]:
        with self._lock:
            preview = self._preview
        if preview is None:
            return Answer()
        until = time.monotonic() + SOON_S
        while True:
            answer = self._questions.ask((self.opened_at, *question), lambda: work(preview))
            if not answer.pending or time.monotonic() > until:
                return answer
            time.sleep(0.01)

    def _start(self, job: Job, work: Callable[[Job], Any]) -> None:
        threading.Thread(target=job.run, args=(work,), daemon=True, name="look").start()

    def _open(self, job: Job) -> dict[str, Any]:
        folder = tokenizer_folder(self.config, lambda phase: job.note(phase.done, phase.total, phase.unit), job.stop.is_set)
        job.note(0, 0)
        preview = Preview(self.config, folder, self.workspace, job.stop.is_set)
        with self._lock:
            if job.stop.is_set():
                preview.close()
                raise CancelledError
            self._folder, self._preview, self.opened_at = folder, preview, time.time()
        threading.Thread(target=self._put_to_sleep, args=(preview, job), daemon=True, name="look").start()
        return preview.about

    def _put_to_sleep(self, preview: Preview, job: Job) -> None:
        while not job.stop.wait(IDLE_S / 10):
            with self._lock:
                busy = self.counting is not None and self.counting.stage == "running"
                if self._preview is preview and not busy and time.monotonic() - self._used > IDLE_S:
                    self._drop_preview()
                    return

    def _start_counting(self) -> None:
        self.counting = Job()
        self._start(self.counting, self._count)

    def _count(self, job: Job) -> dict[str, Any]:
        with Preview(self.config, self._folder, self.workspace, job.stop.is_set) as preview:
            self._counter = preview
            return preview.statistics(job.note, job.stop.is_set)

    def _drop_preview(self) -> None:
        if self._preview is not None:
            self._preview.close()
        self._preview = None


def tokenizer_folder(config: RunConfig, report: Callable[[Phase], None], cancelled: Callable[[], bool]) -> Path | None:
    """Where the tokenizer is; that of a hub model is fetched. None when no model is chosen; a folder may hold nothing else."""
    path = Path(config.model.path).expanduser()
    if not config.model.path.strip():
        return None
    if (path / "tokenizer_config.json").is_file() and not (path / "config.json").exists():
        return path.resolve()
    return resolve_model(config.model, report, cancelled, weights=False)


class Looks:
    """The open look of each workspace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: dict[Path, Look] = {}

    def current(self, workspace: Path) -> Look | None:
        """The look that the workspace's file asks for, opened if it is not; None when no data is open."""
        wish = read_wish(workspace)
        with self._lock:
            look = self._looks.get(workspace)
            if wish is None:
                self._end(workspace)
                return None
            if look is None or look.config != wish.config:
                self._end(workspace)
                look = self._looks[workspace] = Look(workspace, wish)
        look.wake()
        return look

    def open(self, workspace: Path, config: RunConfig) -> None:
        """Show this data, read anew."""
        write_wish(workspace, Wish(config))
        with self._lock:
            self._end(workspace)
            self._looks[workspace] = Look(workspace, Wish(config))

    def cancel(self, workspace: Path) -> None:
        """Stop opening and counting; a restarted dashboard does not begin again."""
        look = self.current(workspace)
        if look is not None:
            look.cancel()
            write_wish(workspace, Wish(look.config, counts=False))

    def count(self, workspace: Path) -> None:
        look = self.current(workspace)
        if look is not None:
            write_wish(workspace, Wish(look.config))
            look.count()

    def close(self, workspace: Path) -> None:
        """No data is open, and its processes have ended."""
        (workspace / NAME).unlink(missing_ok=True)
        with self._lock:
            self._end(workspace)

    def _end(self, workspace: Path) -> None:
        look = self._looks.pop(workspace, None)
        if look is not None:
            look.close()


LOOKS = Looks()


def load_form(workspace: Path) -> list[Any]:
    """Values for all KEYS as the page's form was left; the demo on a first visit."""
    return draft.load(workspace, DRAFT) or form.values(RunConfig())


def save_form(workspace: Path, raw: Sequence[Any]) -> None:
    """Keep the form; only what the look depends on comes from `raw`, the rest is as by default."""
    draft.save(workspace, _relevant(raw), DRAFT)


def open_look(workspace: Path, raw: Sequence[Any]) -> list[tuple[str, str]]:
    """Show the data that the widget values `raw` name, or return what has to be corrected first, by key."""
    save_form(workspace, raw)
    try:
        config = form.config(_relevant(raw))
        if not config.data.path:
            return [("data.path", text("new_run.missing_data"))]
        LOOKS.open(workspace, config)
    except ConfigError as error:
        return error.problems
    except OSError as error:
        return [(NAME, text("data.cannot_write", folder=workspace, reason=error.strerror or error))]
    return []


def _relevant(raw: Sequence[Any]) -> list[Any]:
    plain = form.values(RunConfig())
    return [value if key in LOOK_KEYS else usual for key, value, usual in zip(form.KEYS, raw, plain, strict=True)]
