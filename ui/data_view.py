"""What the Data page shows of rows and figures, as plain values: pure, no gradio. Scripts turn them into text, never into markup."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain.config import RunConfig
from megatrain.data.report import CUT, DUPLICATE, LENGTH_EDGES, SPLIT
from megatrain.units import format_bytes, format_count
from ui.words import section, text

Reply = dict[str, Any]
TURN_CHARACTERS, ROW_TURNS = 3_000, 60  # of a row at first; the whole is shown on a click
WHOLE_CHARACTERS, WHOLE_TURNS = 100_000, 2_000
SHOWN_TOKENS, WHOLE_TOKENS = 2_000, 20_000  # a browser takes a second for 20,000 boxes
HIT_CHARACTERS = 60  # on each side of what was searched for
FEW_TRAINED = 0.05
EMPTY = re.compile(r"\bempty\b")
# Characters that nobody sees, or that turn the direction of what follows. Line ends, tabs and the joiners of words stay as they are.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f"
                     "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]")  # fmt: skip


def visible(words: str) -> str:
    """The text with its control characters and its invisible ones by number: `a\\x00b` as `a⟨U+0000⟩b`."""
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", words)


def progress(done: float, total: float, unit: str) -> str:
    """How far a job is: `12,000 of 50,000 rows`, `1.2 GiB of 3.0 GiB`."""
    if unit == "bytes":
        return text("data.progress_bytes", done=format_bytes(done), total=format_bytes(total))
    if total:
        return text("data.progress_of", done=f"{done:,.0f}", total=f"{total:,.0f}")
    return text("data.progress_rows", done=f"{done:,.0f}")


def about(found: Mapping[str, Any]) -> list[Reply]:
    """The sources that are open: name, format, columns, rows, weight."""
    return [{"name": visible(source["name"]), "format": text(f"choice.data.format.{source['format']}"),
             "columns": [visible(str(column)) for column in source["columns"][:30]],
             "rows": text("data.num_rows", rows=f"{source['total']:,}") if source["total"] else "",
             "weight": "" if len(found["sources"]) == 1 else text("data.weight", weight=f"{source['weight']:g}"),
             "notes": [visible(note) for note in source["notes"]]} for source in found["sources"]]  # fmt: skip


def row(found: Mapping[str, Any], whole: bool) -> Reply:
    """A row as the conversation it is read as, and as it was found. `cut` says that a click shows more."""
    characters, most = (WHOLE_CHARACTERS, WHOLE_TURNS) if whole else (TURN_CHARACTERS, ROW_TURNS)
    turns = [_turn(turn, characters) for turn in found["turns"][:most]]
    values, values_cut = _cut(json.dumps(found["values"], ensure_ascii=False, indent=1), characters)
    cut = values_cut or len(found["turns"]) > most or any(turn["cut"] for turn in turns)
    return {"row": found["row"], "place": visible(found["place"]), "source": visible(found["source"]), "problem": visible(found["problem"]),
            "turns": turns, "num_turns": len(found["turns"]), "values": values, "cut": cut and not whole}  # fmt: skip


def _turn(turn: Mapping[str, Any], characters: int) -> Reply:
    words, cut = _cut(turn["text"], characters)
    calls = [_cut(json.dumps(call, ensure_ascii=False, indent=1), characters)[0] for call in turn["calls"] or []]
    known = section("new_run").get(f"role_{turn['role']}")
    length = f"{len(turn['text']):,}{'+' if len(turn['text']) >= WHOLE_CHARACTERS else ''}"
    return {"role": turn["role"] if known else "other", "name": known or visible(turn["role"]), "text": words, "cut": cut, "length": length,
            "reasoning": _cut(turn["reasoning"] or "", characters)[0], "calls": calls, "trained": turn["trained"]}  # fmt: skip


def _cut(words: str, characters: int) -> tuple[str, bool]:
    return (visible(words), False) if len(words) <= characters else (visible(words[:characters]) + " …", True)


def tokens(found: Mapping[str, Any], whole: bool) -> Reply:
    """A row as the model sees it: for each document its tokens as [text, kind, id]; kind holds t (trained) and s (special)."""
    left = WHOLE_TOKENS if whole else SHOWN_TOKENS
    documents: list[list[list[Any]]] = []
    for document in found["documents"]:
        if left > 0:
            documents.append([_token(token) for token in document[:left]])
        left -= len(document)
    return {"row": found["row"], "documents": documents, "problem": visible(found["problem"]), "change": found["change"],
            "tokens": f"{found['tokens']:,}", "trained": f"{found['trained_tokens']:,}", "length": f"{found['length']:,}",
            "hidden": f"{-left:,}" if left < 0 else "", "cut": left < 0 and not whole,
            "num_documents": len(found["documents"])}  # fmt: skip


def _token(token: Mapping[str, Any]) -> list[Any]:
    shown = visible(token["text"]).replace("\n", "↵\n").replace("\t", "⇥\t")
    return [shown, ("t" if token["trained"] else "") + ("s" if token["special"] else ""), token["id"]]


def hits(found: Mapping[str, Any], words: str) -> Reply:
    """The rows in which a text was found, with what stands around it; and the row to go on from."""
    return {"hits": [{"row": hit["row"], "around": _around(hit, words), "problem": bool(hit["problem"])} for hit in found["rows"]],
            "next": found["next"]}  # fmt: skip


def _around(hit: Mapping[str, Any], words: str) -> list[str]:
    """[before, the text as it stands there, after]."""
    spoken = " ".join(turn["text"] for turn in hit["turns"])
    for whole in (spoken, json.dumps(hit["values"], ensure_ascii=False), hit["place"]):
        found = re.search(re.escape(words), whole, re.IGNORECASE)
        if found:
            begin, end = max(0, found.start() - HIT_CHARACTERS), found.end() + HIT_CHARACTERS
            parts = ("…" if begin else "") + whole[begin : found.start()], found[0], whole[found.end() : end]
            return [visible(" ".join(part.split("\n"))) for part in parts]
    return [visible(spoken[: 2 * HIT_CHARACTERS]), "", ""]


def figures(report: Mapping[str, Any], config: RunConfig) -> Reply:
    """The whole data in numbers: tiles, what became of rows with examples, lengths, sources, and what deserves a look."""
    share = report["trained_share"]
    warnings = [text("data.few_trained", share=f"{100 * share:.1f}")] if share < FEW_TRAINED else []
    return {"tiles": _tiles(report, config), "fates": fates(report), "histogram": histogram(report, config.data.sequence_length),
            "warnings": warnings, "notes": [visible(note) for note in report["notes"]], "sources": _sources(report)}  # fmt: skip


def _tiles(report: Mapping[str, Any], config: RunConfig) -> list[Reply]:
    read, kept = report["rows_read"], report["rows_kept"]
    steps = report["steps_per_epoch"]
    found = {
        "rows": (f"{kept:,}", text("data.of_rows", rows=f"{read:,}")),
        "held_out": (f"{report['eval_rows']:,}", text("data.held_out_note")),
        "tokens": (format_count(report["tokens"]), text("data.longest", tokens=f"{report['longest_row']:,}")),
        "trained": (f"{100 * report['trained_share']:.1f} %", text("data.num_tokens", tokens=format_count(report["trained_tokens"]))),
        "packing": (f"{100 * report['packing_efficiency']:.1f} %", text("data.num_packs", packs=f"{report['num_packs']:,}")),
        "steps": (f"{steps:,}", text("data.of_tokens", tokens=f"{config.train.global_batch_tokens:,}")),
    }
    return [{"key": key, "name": text(f"data.tile_{key}"), "value": value, "detail": detail} for key, (value, detail) in found.items()]


def fates(report: Mapping[str, Any]) -> list[Reply]:
    """What became of rows that are not used whole, with examples: those always looked for first, then what was dropped, by count."""
    examples, dropped = report["examples"], report["dropped"]
    empty = [reason for reason in dropped if EMPTY.search(reason)]
    found = [
        _fate("cut", report["rows_cut"], examples.get(CUT, [])),
        _fate("split", report["rows_split"], examples.get(SPLIT, [])),
        _fate("empty", sum(dropped[reason] for reason in empty), [shown for reason in empty for shown in examples.get(reason, [])]),
        _fate("duplicates", report["duplicates"], examples.get(DUPLICATE, [])),
        _fate("overlap", report["eval_overlap"], []),
        _fate("escaped", report["rows_escaped"], []),
    ]
    found += [{**_fate("dropped", count, examples.get(reason, [])), "name": text("data.fate_dropped", reason=visible(reason))}
              for reason, count in sorted(dropped.items(), key=lambda item: -item[1]) if reason not in empty]  # fmt: skip
    if len(report["sources"]) > 1:  # row numbers of a mixture count within their source
        for fate in found:
            fate["linked"] = False
    return found


def _fate(name: str, count: int, examples: Sequence[Sequence[Any]]) -> Reply:
    tone = "" if not count else "bad" if name in ("dropped", "empty", "overlap") else "warn"
    shown = [{"row": number, "text": visible(words)} for number, words in examples]
    return {"key": name, "name": text(f"data.fate_{name}", reason=""), "help": section("data").get(f"fate_{name}_help", ""),
            "count": f"{count:,}", "tone": tone, "examples": shown, "linked": True}  # fmt: skip


def _sources(report: Mapping[str, Any]) -> list[Reply]:
    return [{"name": visible(source["name"]), "weight": f"{source['weight']:g}", "rows": f"{source['rows']:,}",
             "tokens": format_count(source["tokens"]), "share": f"{100 * source['share']:.1f} %"}
            for source in report["sources"]]  # fmt: skip


def histogram(report: Mapping[str, Any], sequence_length: int) -> Reply | None:
    """Rows by length, in halves of octaves, with a line at the sequence length. x counts halves of octaves: 2 log2(tokens)."""
    counts = [(LENGTH_EDGES.index(most), count) for most, count in report["length_histogram"] if most in LENGTH_EDGES]
    if not counts:
        return None
    edges = [1, *LENGTH_EDGES]
    places = [2 * math.log2(LENGTH_EDGES[at]) - 0.5 for at, _ in counts]
    ranges = [f"{edges[at] + 1:,}–{edges[at + 1]:,}" for at, _ in counts]
    bars = {"type": "bar", "x": places, "y": [count for _, count in counts], "width": 0.92, "marker": {"color": "--mt-blue"},
            "customdata": ranges, "hovertemplate": text("data.bar_hover"), "name": ""}  # fmt: skip
    limit = 2 * math.log2(sequence_length)
    low, high = min(places[0], limit) - 0.7, max(places[-1], limit) + 0.7
    low = max(0.0, min(low, high - 8))
    powers = range(math.ceil(low / 2), math.floor(high / 2) + 1, max(1, round((high - low) / 2 / 7)))
    most = max(count for _, count in counts)
    small = {"size": 11}
    label = {"x": limit, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right" if limit > (low + high) / 2 else "left",
             "showarrow": False, "font": {**small, "color": "--mt-orange"},
             "text": text("data.length_line", tokens=f"{sequence_length:,}")}  # fmt: skip
    line = {"type": "line", "x0": limit, "x1": limit, "yref": "paper", "y0": 0, "y1": 1,
            "line": {"color": "--mt-orange", "width": 2, "dash": "dash"}}  # fmt: skip
    layout = {
        "margin": {"l": 44, "r": 8, "t": 20, "b": 34}, "showlegend": False, "dragmode": False, "shapes": [line], "annotations": [label],
        "xaxis": {"range": [low, high], "tickvals": [2 * power for power in powers], "ticktext": [f"{2**power:,}" for power in powers],
                  "fixedrange": True, "zeroline": False, "title": {"text": text("data.axis_length"), "standoff": 6, "font": small}},
        "yaxis": {"fixedrange": True, "zeroline": False, "rangemode": "tozero", "nticks": 5, "tickformat": "~s",
                  **({"dtick": 1} if most < 5 else {})},
    }  # fmt: skip
    over = sum(count for (_, count), place in zip(counts, places, strict=True) if place > limit)
    words = text("data.histogram_label", rows=f"{sum(count for _, count in counts):,}", over=f"{over:,}")
    return {"data": [bars], "layout": layout, "label": words}
