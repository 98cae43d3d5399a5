"""A checkpoint becomes a Hugging Face folder that other tools load: weights, configuration, tokenizer, model card.

Works on the CPU, a block at a time, and never on the checkpoint itself. The folder appears only when it is whole; then
every tensor is read back and compared, and where memory allows, plain transformers loads it and answers a question.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatrain.engine.events import Phase
from megatrain.errors import CheckpointError, MegaTrainError, ModelError
from megatrain.units import format_bytes, format_count

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from megatrain.engine.checkpoint import CheckpointReader

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
# What belongs to a model folder besides weights and config.json: tokenizer in its many formats, chat templates, licence.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.model", "*.tiktoken", "tekken.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
QUESTION = "What is the capital of France?"  # any chat model answers it in one sentence, so that its end shows
ANSWER_TOKENS = 64


@dataclass(frozen=True)
class ExportReport:
    """What was written and how it was checked."""

    path: str
    dtype: str
    step: int
    num_bytes: int
    files: tuple[str, ...]
    duration_s: float
    loaded: bool  # plain transformers loaded it; False: not tried, see notices
    answer: str = ""  # greedy answer to QUESTION, special tokens left out
    ends_itself: bool | None = None  # the answer ended with the model's own end token; None: not tried
    notices: tuple[str, ...] = ()


def export(
    checkpoint: Path,
    model_folder: Path,
    target: Path,
    dtype: str = "bf16",
    progress: Callable[[Phase], None] = lambda phase: None,
    facts: Mapping[str, str] | None = None,
    try_it: bool = True,
    chat_template: str = "",
) -> ExportReport:
    """Write `checkpoint` to the new folder `target`; `model_folder` is what the training started from.

    `dtype` (a key of DTYPES): bf16 gives the weights that training computed with, fp32 the exact masters. `facts` are lines
    for the model card (label -> text). `chat_template` is written in place of the model folder's own. Phases reported: export
    (bytes), verify. CheckpointError or ModelError when an input is damaged or the result does not read back; DiskFullError.
    A model that does not end its answer is told, not an error.
    """
    from megatrain.engine import checkpoint as checkpoints
    from megatrain.models.inspect import read_config
    from megatrain.models.meta import build_meta_model

    started = time.monotonic()
    if dtype not in DTYPES:
        raise ModelError(f"Unknown format {dtype!r} of the exported weights.", f"Choose one of: {', '.join(DTYPES)}.")
    _check_target(target, checkpoint)
    reader = checkpoints.load(checkpoint)
    config = read_config(model_folder)
    torch_dtype = _torch_dtype(DTYPES[dtype])
    model = build_meta_model(config, torch_dtype)
    _check_same_model(reader, model)
    complete = partial(_complete, model_folder=model_folder, card=model_card(reader, facts or {}), chat_template=chat_template)
    saved = _write(reader, model, config, target, torch_dtype, progress, complete)
    progress(Phase("verify"))
    _check_readable(target, saved.problems)
    answer, ends_itself = "", None
    notices: list[str] = []
    loaded = try_it and _has_memory(saved.num_bytes)
    if loaded:
        answer, ends_itself, notices = _try(target, torch_dtype)
    elif try_it:
        notices = [f"Loading it in transformers was not tried: that needs {format_bytes(saved.num_bytes)} of free memory."]
    files = tuple(sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()))
    num_bytes = sum((target / name).stat().st_size for name in files)
    return ExportReport(
        str(target), dtype, reader.step, num_bytes, files, time.monotonic() - started, loaded, answer, ends_itself, tuple(notices)
    )


def _check_target(target: Path, checkpoint: Path) -> None:
    """The folder can be made, and is nobody's: an export never overwrites, and never writes where checkpoints come and go."""
    place, hint = target.resolve(), "Give a folder that does not exist yet."
    if place.is_relative_to(checkpoint.resolve().parent):
        where = f"{checkpoint.parent}, where the run keeps its checkpoints and removes old ones"
        raise ModelError(f"{target} cannot be exported to: it lies in {where}.", "Give a folder outside of it.")
    if place.is_dir():
        inside = sorted(path.name for path in place.iterdir())
        if inside:
            shown = ", ".join(inside[:3]) + (", …" if len(inside) > 3 else "")
            raise ModelError(f"{target} cannot be exported to: it exists already and is not empty ({shown}).", f"{hint[:-1]}, or empty it.")
    elif place.exists():
        raise ModelError(f"{target} cannot be exported to: it is a file, not a folder.", f"{hint[:-1]}, or remove the file.")
    for parent in place.parents:
        if parent.exists():
            if not parent.is_dir():
                raise ModelError(f"{target} cannot be exported to: {parent} is a file, not a folder.", hint)
            if not os.access(parent, os.W_OK | os.X_OK):
                raise ModelError(f"{target} cannot be exported to: {parent} may not be written to.", "Give a folder that you may write to.")
            return


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return getattr(torch, name)


def _check_same_model(reader: "CheckpointReader", model: "PreTrainedModel") -> None:
    held = {entry.name: entry.shape for layout in reader.layouts for entry in layout.entries}
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    differing = sorted(name for name in held.keys() | wanted if held.get(name) != wanted.get(name))
    if differing:
        raise CheckpointError(
            f"{reader.path} belongs to another model: {len(differing)} weights differ, the first is {differing[0]}.",
            "Export with the model folder that the run started from.",
        )


def _write(
    reader: "CheckpointReader",
    model: "PreTrainedModel",
    config: Any,
    target: Path,
    dtype: "torch.dtype",
    progress: Callable[[Phase], None],
    complete: Callable[[Path], None],
) -> Any:
    from megatrain.models.save import save_pretrained_folder

    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    target.parent.mkdir(parents=True, exist_ok=True)
    return save_pretrained_folder(target, model, config, _tensors(reader, dtype, progress), dtype, complete=complete)


def _tensors(reader: "CheckpointReader", dtype: "torch.dtype", progress: Callable[[Phase], None]) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Every parameter and persistent buffer, a block at a time: compute weights, or exact masters when fp32 is wanted."""
    import torch

    from megatrain.engine.checkpoint import engine_states
    from megatrain.engine.codecs import merge_master

    total, done = sum(layout.weight_bytes for layout in reader.layouts), 0
    wanted = {"weights", "weights_fp32", "buffers"} | ({"masters"} if dtype is torch.float32 else set())
    progress(Phase("export", 0, total, "bytes"))
    for layout in reader.layouts:
        states = engine_states(layout, reader.block(layout.name, wanted))
        views = layout.weight_views(states["weights"])
        exact = merge_master(layout.segment_a(states["weights"]), states["masters"]) if "masters" in states else None
        for entry in layout.entries:
            if exact is not None and entry.segment == "a":
                yield entry.name, exact[entry.offset : entry.offset + entry.numel].view(entry.shape)
            else:
                yield entry.name, views[entry.name]
        for buffer in layout.buffers:
            if buffer.persistent:
                yield buffer.name, views[buffer.name]
        done += layout.weight_bytes
        progress(Phase("export", done, total, "bytes"))


# What goes with the weights -------------------------------------------------------------------------------------------


def _complete(folder: Path, model_folder: Path, card: str, chat_template: str) -> None:
    for pattern in COMPANIONS:
        for path in sorted(model_folder.glob(pattern)):
            if path.is_file():
                place = folder / path.relative_to(model_folder)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place)
    if chat_template:
        (folder / "chat_template.jinja").write_text(chat_template, "utf-8")
    (folder / "README.md").write_text(card, "utf-8")


def model_card(reader: "CheckpointReader", facts: Mapping[str, str]) -> str:
    """README.md: what was trained, on what and how."""
    config = reader.meta.get("config", {})
    model, data, train = (config.get(part, {}) for part in ("model", "data", "train"))
    base, source = str(model.get("path", "")), str(data.get("path", ""))
    num_params = sum(entry.numel for layout in reader.layouts for entry in layout.entries)
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"base_model: {base}"] if _is_hub_id(base) and not model.get("from_scratch") else []
    head += [f"datasets:\n- {source}"] if _is_hub_id(source) else []
    rows = {
        "Base model": "random weights" if model.get("from_scratch") else _shown(base),
        "Data": _shown(source),
        "Trained parameters": f"{format_count(num_params)} (all)",
        "Optimizer steps": str(reader.step),
        "Tokens per step": f"{train['global_batch_tokens']:,}" if "global_batch_tokens" in train else "",
        "Sequence length": f"{data['sequence_length']:,}" if "sequence_length" in data else "",
        "Learning rate": f"{train['learning_rate']:g}, {train.get('schedule', '')}" if "learning_rate" in train else "",
        "Precision": str(reader.meta.get("precision", "")),
        **facts,
    }
    name = config.get("name") or f"Fine-tuned {Path(base).name or 'model'}"
    table = [f"| {label} | {text} |" for label, text in rows.items() if text]
    text = "Trained with MegaTrain, every parameter updated."
    return "\n".join([*head, "tags:\n- megatrain", "---", "", f"# {name}", "", text, "", "| | |", "|---|---|", *table, ""])


def _is_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def _shown(path: str) -> str:
    """A hub id whole; of a folder on this machine only its name."""
    return path if _is_hub_id(path) else Path(path).name


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_readable(target: Path, problems_of: Callable[[Path], Sequence[str]]) -> None:
    try:
        problems = list(problems_of(target))
    except MegaTrainError as error:
        problems = [str(error)]
    if problems:
        shutil.rmtree(target, ignore_errors=True)
        raise ModelError(f"The exported files read back differently: {problems[0]}.", "Check the disk, then export again.")


def _has_memory(num_bytes: int) -> bool:
    return psutil.virtual_memory().available > 1.3 * num_bytes + (1 << 28)


def _try(folder: Path, dtype: "torch.dtype") -> tuple[str, bool | None, list[str]]:
    """Load the folder as any user would and let it answer: (answer, whether it ended by itself, notices)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would fill the log
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        raise ModelError(f"{folder} was written, but transformers cannot load it: {error}") from error
    wrong = [f"{kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:4]}" for kind in _LOADING_FAULTS if info.get(kind)]
    if wrong:
        raise ModelError(f"{folder} was written, but transformers loads it with {'; '.join(wrong)}.")
    return _answer(folder, model.eval())


_LOADING_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _answer(folder: Path, model: "PreTrainedModel") -> tuple[str, bool | None, list[str]]:
    import torch
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")):
        return "", None, ["The model folder has no tokenizer: none was exported, and no answer tried."]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": QUESTION}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        else:
            prompt = tokenizer(QUESTION, return_tensors="pt")
        inputs = {name: prompt[name] for name in ("input_ids", "attention_mask")}
        ends = _end_tokens(model, tokenizer)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=min(ends, default=0))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, IndexError) as error:
        return "", None, [f"No answer could be tried with this tokenizer: {' '.join(str(error).split())[:200]}"]
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    ended = bool(ids) and ids[-1] in ends
    notices = [] if ended else [f"The model did not end its answer within {ANSWER_TOKENS} tokens."]
    return tokenizer.decode(ids, skip_special_tokens=True).strip(), ended, notices


def _end_tokens(model: "PreTrainedModel", tokenizer: Any) -> set[int]:
    configured = model.generation_config.eos_token_id
    ends = set(configured) if isinstance(configured, list) else {configured}
    return {token for token in ends | {tokenizer.eos_token_id} if token is not None}
