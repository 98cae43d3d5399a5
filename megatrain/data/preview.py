"""What the Data page asks: rows as conversations, a row as the model sees it, search, and figures. Loads no transformers.

Tokenizers load in a process of their own (browse.py), which lives as long as the Preview that started it:

    with Preview(config, tokenizer_folder, workspace) as preview:
        preview.about            {"sources": [{"name", "format", "weight", "columns", "total", "notes"}], "template", "has_tokenizer"}
        preview.rows(0, 20)      {"rows": [...], "more": bool}
            row: {"row", "source", "place", "problem", "turns": [{"role", "text", "reasoning", "calls", "trained"}], "values"}
            `row` counts from 1 through all sources; `problem` is why it is not used, "" when it is; `values` is the row as it was found.
        preview.tokens(7)        {"row", "place", "problem", "change", "documents": [[{"text", "id", "trained", "special"}, ...], ...],
                                  "length", "tokens", "trained_tokens"}
            `length` is that of the whole row; the documents are what is trained on of it (`change` says cut, split or nothing). Of a
            character that several tokens share the first has the text and the others "".
        preview.search("word")   {"rows": [as above], "next": row to go on from, 0 at the end}
        preview.statistics()     the DataReport as a dict, and "trained_share", "steps_per_epoch"; tokenises everything into the
                                 workspace's cache, where a run finds it. `progress(done, total)` in rows; `cancelled()` is polled.

Without a tokenizer folder there are rows and search, and no tokens and figures. What goes wrong is a DataError, for figures a
NothingTrainedError where no row gives a token to train on. Requests are answered one after the other: for rows while figures
are made, take a second Preview.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig
from megatrain.data import recipes
from megatrain.data.report import NothingTrainedError
from megatrain.errors import DataError
from megatrain.platform import stop_child

_POLL_S = 0.1
START_S, ANSWER_S = 120.0, 60.0


class Preview:
    """A look at the data of one configuration. `cancelled` is polled until it is open; then its process is ended, and DataError raised."""

    def __init__(self, config: RunConfig, tokenizer_folder: Path | None, workspace: Path,
                 cancelled: Callable[[], bool] | None = None) -> None:  # fmt: skip
        config = replace(config, data=recipes.located(config.data, workspace))
        request = {"config": asdict(config), "tokenizer": str(tokenizer_folder) if tokenizer_folder else "",
                   "cache": str(workspace / "cache" / "data")}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatrain.data.browse"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8", cwd=Path(__file__).parents[2])  # fmt: skip
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.about = self._ask({"do": "open", **request}, START_S if cancelled is None else None, cancelled=cancelled)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def rows(self, start: int, count: int) -> dict[str, Any]:
        return self._ask({"do": "rows", "start": start, "count": count})

    def tokens(self, row: int) -> dict[str, Any]:
        return self._ask({"do": "tokens", "row": row})

    def search(self, text: str, start: int = 1, limit: int = 20) -> dict[str, Any]:
        return self._ask({"do": "search", "text": text, "start": start, "limit": limit})

    def statistics(
        self, progress: Callable[[int, int], None] = lambda done, total: None, cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        return self._ask({"do": "statistics"}, None, progress, cancelled)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed by `close`
            for line in self._process.stdout:
                if line.startswith("{"):
                    self._answers.put(json.loads(line))
        self._answers.put(None)

    def _ask(self, request: dict[str, Any], patience_s: float | None = ANSWER_S, progress: Callable[[int, int], None] | None = None,
             cancelled: Callable[[], bool] | None = None) -> dict[str, Any]:  # fmt: skip
        with self._lock:
            self._say(request)
            give_up = None if patience_s is None else time.monotonic() + patience_s
            while True:
                try:
                    answer = self._answers.get(timeout=_POLL_S)
                except queue.Empty:
                    if cancelled is not None and cancelled():
                        if request["do"] == "open":
                            raise DataError("Opening the data was stopped.", "Open it again.") from None
                        self._say({"do": "cancel"})
                        cancelled = None
                    if give_up is not None and time.monotonic() > give_up:
                        self.close()
                        raise DataError("The preview did not answer in time.", "Try again; a very long row may be the cause.") from None
                    continue
                if answer is None:
                    raise DataError("The process of the preview has ended.", "Open the data again.")
                if "done" in answer:
                    if progress is not None:
                        progress(answer["done"], answer["total"])
                    continue
                if "error" in answer:
                    raise (NothingTrainedError if answer.get("nothing_trained") else DataError)(answer["error"], answer["hint"])
                return dict(answer["answer"])

    def _say(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise DataError("The process of the preview has ended.", "Open the data again.") from error

    def close(self) -> None:
        stop_child(self._process)

    def __enter__(self) -> "Preview":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
