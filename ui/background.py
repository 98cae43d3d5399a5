"""Answers that take longer than a handler may: asked any number of times, worked out once, in a thread.

A handler calls `ask` and gets at once what is known; the page asks again while the answer is pending. Nothing here
belongs to a browser tab: two tabs with the same question share one answer.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatrain.errors import MegaTrainError

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """`pending`, or a `value`, or the `error` that came instead."""

    value: T | None = None
    error: MegaTrainError | None = None

    @property
    def pending(self) -> bool:
        return self.value is None and self.error is None


class Background:
    """At most `workers` questions at a time; the newest `keep` answers are remembered, failures for `retry_s`."""

    def __init__(self, workers: int = 2, keep: int = 64, retry_s: float = 20.0) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="question")
        self._answers: OrderedDict[Hashable, Future] = OrderedDict()
        self._failed_at: dict[Hashable, float] = {}
        self._lock = threading.Lock()
        self._keep, self._retry_s = keep, retry_s

    def ask(self, question: Hashable, work: Callable[[], T]) -> Answer[T]:
        """What is known of `question`; starts `work` when nobody has asked yet, or when a failure has grown old."""
        with self._lock:
            future = self._answers.get(question)
            if future is None or self._stale(question, future):
                future = self._answers[question] = self._pool.submit(work)
                self._failed_at.pop(question, None)
            self._answers.move_to_end(question)
            self._forget_oldest()
        if not future.done():
            return Answer()
        error = future.exception()
        if error is None:
            return Answer(value=future.result())
        if not isinstance(error, MegaTrainError):
            raise error  # a fault of ours: let it be seen
        with self._lock:
            self._failed_at.setdefault(question, time.monotonic())
        return Answer(error=error)

    def knows(self, question: Hashable) -> bool:
        """Whether somebody has asked."""
        with self._lock:
            return question in self._answers

    def forget(self, question: Hashable) -> None:
        """Ask anew next time."""
        with self._lock:
            self._answers.pop(question, None)
            self._failed_at.pop(question, None)

    def _stale(self, question: Hashable, future: Future) -> bool:
        failed = self._failed_at.get(question)
        return failed is not None and future.done() and time.monotonic() - failed > self._retry_s

    def _forget_oldest(self) -> None:
        done = [key for key, future in self._answers.items() if future.done()]
        for key in done[: max(0, len(self._answers) - self._keep)]:
            del self._answers[key]
            self._failed_at.pop(key, None)
