"""Run folders with a realistic history, written without an engine: for pages, screenshots and tests.

Everything goes into the store's own tables; only times lie in the past, which the store itself would never write.
"""

import math
import random
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig
from megatrain.plan import Placement, Plan, Predicted
from megatrain.platform import FileLock
from megatrain.runs.records import ACTIVE, RunState, to_json
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import create_run
from megatrain.units import GIB

CONFIG = RunConfig.from_dict({"name": "qwen-1.5b-support", "model": {"path": "Qwen/Qwen2.5-1.5B"}, "data": {"path": "support-chats.jsonl"}})
LOG = """\
{stamp} INFO  worker: run folder {folder}
{stamp} INFO  model: Qwen/Qwen2.5-1.5B, 28 layers, 1.54 B parameters
{stamp} INFO  data: 4,213 rows read, 4,198 kept, 15 dropped (empty answer 12, no assistant turn 3)
{stamp} WARNING data: 37 rows are longer than 1024 tokens and were cut
{stamp} INFO  plan: weights RAM, moments RAM, gradients RAM; 6 micro-batches in 1 group
"""


def plan(gpu: bool) -> Plan:
    """A plan whose predictions lie near the readings below."""
    vram = {"weights": int(3.1 * GIB), "activations": int(1.9 * GIB), "buffers": int(0.6 * GIB)} if gpu else {}
    ram = {"weights": 3 * GIB, "masters": 3 * GIB, "moments": 12 * GIB}
    predicted = Predicted(sum(vram.values()), sum(ram.values()), 0, vram, ram, {}, 1.9, 8600.0, "h2d")
    return Plan((Placement(),), 1, 4, device="cuda:0" if gpu else "cpu", predicted=predicted)


class FakeRun:
    """One run in a workspace. While it is active it holds its lock, as a worker would; `close` gives it back."""

    def __init__(self, workspace: Path, name: str = "", gpu: bool = True, num_steps: int = 3000, step_s: float = 1.9) -> None:
        config = replace(CONFIG, name=name or CONFIG.name)
        self.store: RunStore = create_run(workspace, config)
        self.folder, self.run_id, self.gpu, self.num_steps, self.step_s = self.store.folder, self.store.run_id, gpu, num_steps, step_s
        self.lock: FileLock | None = None
        self.step = 0
        self.now = time.time()
        self._random = random.Random(7)
        (self.folder / "plan.json").write_text(plan(gpu).to_json(), "utf-8")

    def start(self, steps_ago: int = 0) -> "FakeRun":
        """The worker lives, all stages before training are done, and training began `steps_ago` steps ago."""
        self.lock = FileLock(self.folder / "lock").acquire()
        self.now = time.time() - steps_ago * self.step_s - 40
        self.fact("num_steps", self.num_steps)
        self.fact("started_s", self.now)
        self.fact("attempt", 1)
        self.state(RunState.STARTING)
        stages = (("download", 3.09e9, "bytes"), ("tokenise", 4213, "rows"), ("check", 2, "layers"), ("load", 30, "blocks"))
        for name, total, unit in stages:
            self.phase(name, total, total, unit)
            self.now += 9
        stamp = time.strftime("%H:%M:%S", time.localtime(self.now))
        (self.folder / "worker.log").write_text(LOG.format(stamp=stamp, folder=self.folder), "utf-8")
        self.state(RunState.RUNNING)
        self.phase("train", 0, self.num_steps, "steps")
        return self

    def train(self, steps: int, evaluate_every: int = 50, checkpoint_every: int = 100) -> "FakeRun":
        """Adds `steps` steps with their telemetry, evaluations and checkpoints."""
        with self.database() as database:
            for _ in range(steps):
                self.step += 1
                self._add_step(database)
        for step in range(self.step - steps + 1, self.step + 1):
            when = self.now - (self.step - step) * self.step_s
            if evaluate_every and step % evaluate_every == 0:
                self.event("eval", {"step": step, "loss": self.loss(step) + 0.06, "trained_tokens": 9000, "duration_s": 4.0}, when)
            if checkpoint_every and step % checkpoint_every == 0:
                self.event("checkpoint", {"step": step, "path": "", "num_bytes": 18_500_000_000, "duration_s": 38.0, "removed": []}, when)
        with (self.folder / "worker.log").open("a", encoding="utf-8") as log:
            stamp = time.strftime("%H:%M:%S", time.localtime(self.now))
            log.write(f"{stamp} INFO  step {self.step}: loss {self.loss(self.step):.4f}\n")
        return self

    def loss(self, step: int) -> float:
        """A course that falls and flattens."""
        return 1.32 + 0.9 * math.exp(-step / 260) + 0.25 * math.exp(-step / 25)

    def state(self, state: RunState, **details: Any) -> None:
        """The run is in `state` from `self.now` on."""
        self.fact("state", {"state": state, "reason": "", "since_s": self.now, **details})
        self.event("state", {"state": state, "reason": "", **details})
        if state not in ACTIVE:
            self.fact("ended_s", self.now)
            self.close()

    def phase(self, name: str, done: float, total: float, unit: str) -> None:
        """A stage has moved on."""
        data = {"name": name, "done": done, "total": total, "unit": unit}
        self.fact("phase", data)
        self.event("phase", data)

    def event(self, kind: str, data: dict[str, Any], when: float | None = None) -> None:
        with self.database() as database:
            database.execute("INSERT INTO events (time_s, kind, data) VALUES (?, ?, ?)", (when or self.now, kind, to_json(data)))

    def fact(self, key: str, value: Any) -> None:
        with self.database() as database:
            database.execute("INSERT OR REPLACE INTO facts (key, value) VALUES (?, ?)", (key, to_json(value)))

    def checkpoint_folder(self, step: int) -> None:
        """A complete checkpoint on disk, so that the run can be resumed."""
        folder = self.folder / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(to_json({"blocks": [], "sequence": step, "sha256": "0" * 64}), "utf-8")

    def vanish(self) -> None:
        """The process is gone without a word."""
        self.close()

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def database(self) -> "_Commit":
        return _Commit(self.folder / "run.sqlite")

    def _add_step(self, database: sqlite3.Connection) -> None:
        noise = self._random.gauss
        self.now += self.step_s
        tokens, step_s = 16384, self.step_s * (1 + abs(noise(0, 0.02)))
        loss = self.loss(self.step) + noise(0, 0.07)
        norm = 0.9 + 2.0 * math.exp(-self.step / 60) + abs(noise(0, 0.25))
        rate = 1e-5 * min(1, self.step / 100) * (0.55 + 0.45 * math.cos(math.pi * self.step / self.num_steps))
        moved = {"h2d": int(3.2e9 * 2 * 5), "d2h": int(3.2e9 * 5)} if self.gpu else {}
        counts = (tokens, tokens - 4000, step_s, tokens / step_s, self.step / 400)
        cells = (self.now, self.step, loss, norm, rate, *counts, to_json(moved), "{}")
        database.execute(
            "INSERT INTO steps (time_s, step, loss, grad_norm, learning_rate, num_tokens, trained_tokens, step_s, tokens_per_s,"
            " epoch, bytes, waits) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", cells,
        )  # fmt: skip
        database.execute("INSERT INTO telemetry (time_s, data) VALUES (?, ?)", (self.now, to_json(self._readings())))

    def _readings(self) -> dict[str, float]:
        noise = self._random.gauss
        readings = {"ram_used_bytes": 26 * GIB + noise(0, 0.1) * GIB, "worker_ram_bytes": 17.4 * GIB, "cpu_utilization": 0.4}
        if self.gpu:
            readings |= {
                "gpu0_vram_used_bytes": (6.4 + noise(0, 0.03)) * GIB, "process_vram_bytes": 5.3 * GIB, "gpu0_vram_total_bytes": 12 * GIB,
                "gpu0_utilization": 0.93 + noise(0, 0.02), "gpu0_power_w": 214 + noise(0, 6), "gpu0_temperature_c": 67,
                "gpu0_pcie_down_bytes_per_s": 17.1e9 + noise(0, 0.8e9), "gpu0_pcie_up_bytes_per_s": 8.3e9 + noise(0, 0.5e9),
            }  # fmt: skip
        return {f"{key}_{kind}": value for key, value in readings.items() for kind in ("mean", "max")}


class _Commit:
    """One SQLite connection for one commit; closed at the end, so that nothing keeps the folder open."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)

    def __enter__(self) -> sqlite3.Connection:
        return self.connection.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.connection.__exit__(*error)
        self.connection.close()
