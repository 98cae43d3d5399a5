"""How a run ended, in words: what happened, what to do, and the button that does it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """One failure card of the page. `action` names what a button offers; empty when there is nothing to press."""

    title: str
    text: str
    hint: str = ""
    action: str = ""


@dataclass(frozen=True)
class Vanished:
    """What is left of a worker that ended without a word."""

    exit_code: int | None  # negative: the signal; None: nobody was there to see it
    log_tail: str
    step: int = 0
    phase: str = ""  # what it was doing: download, tokenise, load, train, save, ...
    ram_share: float | None = None  # memory in use at the last reading
    system_killed: bool | None = None  # the kernel has ended a process for lack of memory since the start
    free_disk_bytes: int | None = None
    checkpoint_step: int | None = None  # newest complete one


def explain_vanished(end: Vanished) -> Explanation:
    """Why a worker is gone, from what it left."""
    hint = f"Resume goes on from step {end.checkpoint_step}." if end.checkpoint_step is not None else "Start it again from the beginning."
    return Explanation("The process vanished", "It ended without a word (power, restart, or killed from outside).", hint, "resume")
