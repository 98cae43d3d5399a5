"""Stands in for the process that reads data: the same questions and answers, at once."""

import time
from typing import Any

from megatrain.data.report import DataReport, NothingTrainedError
from megatrain.errors import DataError

ABOUT = {"sources": [{"name": "chats.jsonl", "format": "messages", "weight": 1.0, "columns": ["messages"], "total": 0, "notes": []}],
         "has_tokenizer": True, "template": "tokenizer"}  # fmt: skip


def described(number: int, words: str = "hello", problem: str = "") -> dict[str, Any]:
    """A row as the real one describes it."""
    turns = [{"role": role, "text": words, "trained": role == "assistant", "reasoning": "", "calls": []} for role in ("user", "assistant")]
    return {"row": number, "source": "chats.jsonl", "place": f"chats.jsonl line {number}", "problem": problem,
            "turns": [] if problem else turns, "values": {"messages": words}}  # fmt: skip


def report(**changes: Any) -> dict[str, Any]:
    """What statistics() answers."""
    values: dict[str, Any] = {
        "format": "messages", "source": "chats.jsonl", "rows_read": 100, "rows_kept": 90, "rows_cut": 4, "tokens": 20_000,
        "dropped": {"the answer is empty": 7, "column `output` is missing or empty": 1, "the role `wizard` is not known": 2},
        "examples": {"the answer is empty": [(3, "chats.jsonl line 3: {}")], "the same as an earlier row": [(9, "the same as row 8")],
                     "longer than the sequence length: cut": [(5, "chats.jsonl line 5: {}")]},
        "trained_tokens": 5_000, "eval_rows": 2, "num_packs": 80, "packing_efficiency": 0.975, "duplicates": 1,
        "length_histogram": [(128, 50), (256, 30), (2048, 10)], "longest_row": 1_500,
    }  # fmt: skip
    made = DataReport(**(values | changes))
    return {**made.to_dict(), "trained_share": made.trained_share, "steps_per_epoch": 5}


class FakePreview:
    """100 rows. `opened` counts the processes; tests set what shall happen on the class of their own that `fake` makes."""

    opened: list["FakePreview"]
    fault: DataError | None = None  # of opening
    held = ""  # "opening" or "counting" lasts until it is cancelled, or this is something else
    nothing_trained = False
    words = "hello"  # of every row

    def __init__(self, config, folder, workspace, cancelled=None) -> None:
        self.config, self.folder, self.is_alive, self.about = config, folder, True, ABOUT | {"has_tokenizer": folder is not None}
        type(self).opened.append(self)
        while self.held == "opening" and not cancelled():
            time.sleep(0.01)
        if self.fault or cancelled():
            self.is_alive = False
            raise self.fault or DataError("Opening the data was stopped.")

    def row(self, number: int) -> dict[str, Any]:
        return described(number, self.words, "" if number != 2 else f"the role `{self.words}` is not known")

    def rows(self, start: int, count: int) -> dict[str, Any]:
        numbers = range(start + 1, min(100, start + count) + 1)
        return {"rows": [self.row(number) for number in numbers], "more": start + count < 100}

    def tokens(self, row: int) -> dict[str, Any]:
        document = [{"text": self.words, "id": 5, "trained": True, "special": False}]
        return {"row": row, "place": "", "problem": "", "change": "", "documents": [document],
                "length": 1, "tokens": 1, "trained_tokens": 1}  # fmt: skip

    def search(self, text: str, start: int = 1, limit: int = 20) -> dict[str, Any]:
        return {"rows": [described(7, f"some {text} here")], "next": 0}

    def statistics(self, progress=None, cancelled=lambda: False) -> dict[str, Any]:
        progress(10, 100)
        while self.held == "counting" and not cancelled():
            time.sleep(0.01)
        if cancelled():
            raise DataError("The preparation of the data was stopped.")
        if self.nothing_trained:
            raise NothingTrainedError("None of the 3 rows gives a token to train on.", "Correct the rows.")
        return report(dropped={f"the role `{self.words}` is not known": 1}, notes=[self.words])

    def close(self) -> None:
        self.is_alive = False

    def __enter__(self) -> "FakePreview":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def fake() -> type[FakePreview]:
    """A class of its own for one test."""
    return type("Preview", (FakePreview,), {"opened": []})
