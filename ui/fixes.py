"""The buttons of failure cards that change a setting before the run goes on, and the text for asking others for help."""

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from megatrain.config import RunConfig
from megatrain.errors import RunError
from megatrain.plan import Predicted
from megatrain.runs.diagnose import mask
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import change_config
from megatrain.units import GIB
from ui.feed import RunFeed

LOWER = 0.85  # of the limit, or of the predicted peak
PACKAGES = ("torch", "transformers", "numpy", "gradio")
LOG_LINES = 100


def _half_learning_rate(config: RunConfig, predicted: Predicted | None) -> dict[str, Any]:
    return {"train.learning_rate": config.train.learning_rate / 2}


def _lower_vram(config: RunConfig, predicted: Predicted | None) -> dict[str, Any]:
    return {"memory.vram_limit_gib": _lowered(config.memory.vram_limit_gib, predicted.vram_bytes if predicted else 0)}


def _lower_ram(config: RunConfig, predicted: Predicted | None) -> dict[str, Any]:
    return {"memory.ram_limit_gib": _lowered(config.memory.ram_limit_gib, predicted.ram_bytes if predicted else 0)}


def _lowered(limit_gib: float | None, predicted_bytes: int) -> float:
    used = limit_gib or predicted_bytes / GIB
    if not used:
        raise RunError("This run has no plan whose limit could be lowered.", "Set a limit on the page New run.")
    return round(used * LOWER, 2)


# Explanation.action -> the settings to change
CHANGES: dict[str, Callable[[RunConfig, Predicted | None], dict[str, Any]]] = {
    "halve_learning_rate": _half_learning_rate,
    "lower_vram": _lower_vram,
    "lower_ram": _lower_ram,
}


def apply(store: RunStore, action: str) -> None:
    """Change the run's config.yaml as the action says; RunError while the run is live."""
    rows = RunFeed(store).rows()
    if rows.config is None:
        raise RunError("The configuration of this run cannot be read.", "Start a new run.")
    change_config(store, CHANGES[action](rows.config, rows.predicted))


def diagnostics(feed: RunFeed) -> str:
    """What somebody needs who is asked for help. Tokens, passwords and the name of the home folder are masked."""
    rows = feed.rows()
    error = rows.status.error
    lines = [f"Run {rows.run_id}: {rows.status.state} at step {rows.status.step} of {rows.status.num_steps}"]
    if error is not None:
        lines += [error.title, error.text, error.hint]
    lines.append(f"Python {platform.python_version()} on {platform.platform()}")
    lines.append(", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    if rows.predicted is not None:
        lines.append(f"Plan: {rows.predicted}")
    if rows.config is not None:
        lines += ["", rows.config.to_yaml()]
    lines += ["Last lines of the log:", *feed.store.log_tail().splitlines()[-LOG_LINES:]]
    return mask("\n".join(lines))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
