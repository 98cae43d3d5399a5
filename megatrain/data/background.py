"""Shards that another process is still writing, and the wait for one of them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from megatrain.config import DataConfig
from megatrain.data.cache import Shards, open_shards
from megatrain.data.tokenise import request
from megatrain.errors import DataError
from megatrain.platform import stop_child


class Tokeniser:
    """A process that tokenises one source. It ends with the process that started it, or with `stop`."""

    def __init__(self, config: DataConfig, tokenizer_folder: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "megatrain.data.tokenise", request(config, tokenizer_folder, folder)]
        threads = str(max(1, (os.cpu_count() or 1) // 4))  # training wants the other cores
        self.done, self.total, self.error, self.hint = 0, 0, "", ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
            env={**os.environ, "RAYON_NUM_THREADS": threads}, cwd=Path(__file__).parents[2])  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed by `stop`
            for line in self._process.stdout:
                said = json.loads(line) if line.startswith("{") else {}
                self.done, self.total = said.get("done", self.done), said.get("total", self.total)
                self.error, self.hint = said.get("error", self.error), said.get("hint", self.hint)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """DataError when the process has ended before its work was done."""
        code = self._process.poll()
        if code not in (None, 0):
            time.sleep(0.1)  # its last words
            raise DataError(self.error or f"The process that tokenises the data ended early (exit code {code}).",
                            self.hint or "Start again: what it has done so far is kept.")  # fmt: skip

    def stop(self) -> None:
        stop_child(self._process)


class GrowingShards:
    """The shards of a cache folder, as many as there are by now. `tokeniser` is None when all are there."""

    def __init__(self, known: Shards, tokeniser: Tokeniser | None = None) -> None:
        self.known, self.tokeniser = known, tokeniser

    def poll(self, count: int, patience_s: float = 0.2) -> bool:
        """Whether at least `count` shards are there, or all that there will ever be. DataError when they will not come."""
        if not self.known.complete and len(self.known.shards) < count:
            if self.tokeniser is not None:
                self.tokeniser.check()
            self.known = open_shards(self.known.folder, self.known)
        if self.known.complete and self.tokeniser is not None:
            self.tokeniser.stop()
            self.tokeniser = None
        if self.known.complete or len(self.known.shards) >= count:
            return True
        if self.tokeniser is None:
            raise DataError(f"The tokens in {self.known.folder} are not complete.", "Start the run again.")
        time.sleep(patience_s)
        return False

    def wait_for(self, count: int) -> Shards:
        """At least `count` shards, or all that there will ever be."""
        while not self.poll(count):
            pass
        return self.known
