"""The one debug switch, MEGATRAIN_DEBUG: a comma-separated list of the modes below, read once when a device is made."""

import os
from dataclasses import dataclass

from megatrain.errors import ConfigError

MODES = {
    "poison": "fill every released slot with NaN before its next owner may write",
    "sync": "wait after every operation: the blocking mode that overlap is compared with",
    "delay": "let random operations on the GPU start late, so that a missing hand-over shows",
}


@dataclass(frozen=True)
class Debug:
    """Which modes are on."""

    poison: bool = False
    sync: bool = False
    delay: bool = False


def read_debug(text: str | None = None) -> Debug:
    """The modes named in `text`, by default in the environment. ConfigError for a mode that does not exist."""
    value = os.environ.get("MEGATRAIN_DEBUG", "") if text is None else text
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise ConfigError([("MEGATRAIN_DEBUG", f"unknown mode {', '.join(unknown)}")], f"Known modes: {', '.join(MODES)}.")
    return Debug(**dict.fromkeys(names, True))
