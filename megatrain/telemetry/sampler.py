"""Samples readings five times a second in a thread of its own and publishes mean and maximum once a second.

Bursts on the bus last milliseconds: one look a second would miss them. A sampler that dies says so; training goes on.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence

Readings = dict[str, float | None]

SAMPLE_S = 0.2
PUBLISH_S = 1.0


class Sampler:
    """Calls every reader, and `publish(time_s, values)` once a second; `failed(error)` once, if it has to give up.

    A reading that was never available in a second is absent from its values. Bit masks (`_throttle`) are united:
    their `_max` holds every bit that was set.
    """

    def __init__(self, readers: Sequence[Callable[[], Readings]], publish: Callable[[float, Readings], None],
                 failed: Callable[[Exception], None], sample_s: float = SAMPLE_S, publish_s: float = PUBLISH_S) -> None:  # fmt: skip
        self._readers, self._publish, self._failed = readers, publish, failed
        self._sample_s, self._publish_s = sample_s, publish_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> "Sampler":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread; what was gathered of the running second is published."""
        self._stop.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # whatever ends the readings must be told and must not end the training
            self._failed(error)

    def _sample_until_stopped(self) -> None:
        gathered: dict[str, list[float]] = {}
        due = time.monotonic() + self._publish_s
        stopped = False
        while not stopped:
            for reader in self._readers:
                for key, value in reader().items():
                    if value is not None and math.isfinite(value):
                        gathered.setdefault(key, []).append(value)
            stopped = self._stop.wait(self._sample_s)
            if gathered and (stopped or time.monotonic() >= due):
                self._publish(time.time(), summarise(gathered))
                gathered = {}
                due = time.monotonic() + self._publish_s


def summarise(gathered: dict[str, list[float]]) -> Readings:
    """key_mean and key_max of every key; for bit masks the union as key_max."""
    values: Readings = {}
    for key, samples in gathered.items():
        if key.endswith("_throttle"):
            bits = 0
            for sample in samples:
                bits |= int(sample)
            values[f"{key}_max"] = bits
        else:
            values[f"{key}_mean"] = sum(samples) / len(samples)
            values[f"{key}_max"] = max(samples)
    return values
