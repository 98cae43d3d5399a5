"""run.sqlite: one small database per run, written by its worker while pages read it.

Write-ahead log, so that readers and the writer never wait for each other; connections are short-lived except the
worker's, so that nothing keeps a deleted folder open. A file that is no database any more is set aside, never deleted.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.errors import RunError

SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL, step INTEGER, loss REAL, grad_norm REAL, learning_rate REAL,
    num_tokens INTEGER, trained_tokens INTEGER, step_s REAL, tokens_per_s REAL, epoch REAL, bytes TEXT, waits TEXT);
CREATE TABLE IF NOT EXISTS telemetry (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL, data TEXT);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL, kind TEXT, data TEXT);
CREATE TABLE IF NOT EXISTS commands (id INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL, command TEXT, taken_s REAL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT);
CREATE INDEX IF NOT EXISTS steps_by_step ON steps (step);
"""

BUSY_S = 0.25  # how long one call waits for another process's lock

Statement = tuple[str, Sequence[Any]]


class DatabaseBusyError(RunError):
    """The database cannot be used now (locked, disk full, read-only); trying again later may work."""


class DatabaseDamagedError(RunError):
    """The file is not a readable database."""


class Database:
    """One SQLite file. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: sqlite3.Connection | None = None
        self._guard = threading.RLock()

    def create(self) -> None:
        """Makes the file and its tables; what is there stays."""
        with self._translated():
            connection = self._connect("rwc")
            try:
                connection.execute("PRAGMA journal_mode=WAL")  # stays with the file
                connection.executescript(SCHEMA)
            finally:
                connection.close()

    def hold(self) -> None:
        """Keeps one connection for this process's writes until `drop`: no reconnect and no flush of the log each time."""
        with self._guard, self._translated():
            self._held = self._held or self._connect("rw")

    def drop(self) -> None:
        """Closes the held connection."""
        with self._guard:
            if self._held is not None:
                self._held.close()
                self._held = None

    @contextmanager
    def reading(self, patience_s: float = 1.0) -> Iterator[sqlite3.Connection]:
        """A connection for a few quick selects."""
        with self._translated():
            connection = self._patiently(patience_s)
            try:
                yield connection
            finally:
                connection.close()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.reading() as connection:
            return connection.execute(sql, parameters).fetchall()

    def write(self, statements: Sequence[Statement]) -> None:
        """All of them in one commit, or none."""
        with self._guard, self._translated():
            connection = self._held or self._connect("rw")
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    for sql, parameters in statements:
                        connection.execute(sql, parameters)
                    connection.execute("COMMIT")
                except sqlite3.Error:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            finally:
                if connection is not self._held:
                    connection.close()

    def is_damaged(self) -> bool:
        """True when the file is there and is no readable database of a run."""
        try:
            self.read("SELECT count(*) FROM facts")
            rows = self.read("PRAGMA quick_check(1)")
        except DatabaseDamagedError:
            return True
        return rows != [("ok",)]

    def set_aside(self) -> Path:
        """Renames the damaged file (and its log) and starts an empty one; returns where the damaged one is now."""
        with self._guard:
            held = self._held is not None
            self.drop()
            stamp = time.strftime("%Y%m%d-%H%M%S")
            kept = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
            for suffix in ("", "-wal", "-shm"):
                source = self.path.with_name(self.path.name + suffix)
                if source.exists():
                    source.replace(kept.with_name(kept.name + suffix))
            self.create()
            if held:
                self.hold()
            return kept

    def _connect(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode={mode}", uri=True, timeout=BUSY_S,
                                     isolation_level=None, check_same_thread=False)  # fmt: skip
        try:
            connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the last second, never the file
            connection.execute("SELECT count(*) FROM sqlite_master")  # opening alone reads nothing
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _patiently(self, patience_s: float) -> sqlite3.Connection:
        give_up = time.monotonic() + patience_s
        while True:
            try:
                return self._connect("rw")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and self.path.exists():
                    return self._connect("ro")
                if time.monotonic() > give_up or error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such table" in str(error):
                raise DatabaseDamagedError(f"{self.path} is damaged: {error}.") from error
            if isinstance(error, sqlite3.OperationalError):
                raise DatabaseBusyError(f"{self.path} cannot be used now: {error}.", "It is tried again by itself.") from error
            raise
