"""Makes assets/demo-model/: the small model that the demo fine-tunes, pre-trained by this engine on Python's own library.

Two commands, from the repository's root:

    python assets/make_demo_model.py prepare      # corpus, tokenizer and configuration -> build/demo-model/
    python assets/make_demo_model.py train        # from random weights; the result -> assets/demo-model/

`prepare` reads the standard library of the Python that runs it and needs no torch; the same Python gives the same files.
`train` needs build/demo-model/ only, so that it may run on another machine. It is an ordinary run and an ordinary export
of `python -m megatrain`; a GPU needs minutes, a laptop some hours.

The corpus is every function outside the demo's packages (see megatrain/data/stdlib.py). A function whose code also
stands in a demo package is left out, so the demo's rows, trained on or held out, are new to the model.
"""

import argparse
import json
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatrain.config import CheckpointConfig, DataConfig, EvalConfig, ModelConfig, RunConfig, TrainConfig  # noqa: E402
from megatrain.data import stdlib  # noqa: E402
from megatrain.runs import supervisor  # noqa: E402
from megatrain.runs.records import StepRow  # noqa: E402

BUILD = ROOT / "build" / "demo-model"
TARGET = ROOT / "assets" / "demo-model"
RUN_NAME = "demo-model"

CORPUS_LINES = (2, 300)  # of a function; one that is longer than the context is split
VOCAB_SIZE = 4096
END, PAD, USER, ASSISTANT, SYSTEM = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
TRAINING = RunConfig(
    name=RUN_NAME,
    precision="bf16",
    model=ModelConfig(path=str(BUILD.relative_to(ROOT)), from_scratch=True),
    data=DataConfig(path=str((BUILD / "corpus.jsonl").relative_to(ROOT)), format="text", sequence_length=1024, eval_fraction=0.02),
    train=TrainConfig(
        num_epochs=8.0, global_batch_tokens=16384, learning_rate=1.5e-3, warmup_steps=50, min_lr_ratio=0.02, weight_decay=0.1
    ),
    checkpoint=CheckpointConfig(keep=1),
    evaluation=EvalConfig(every_steps=50, max_packs=32),
)


def prepare(folder: Path) -> None:
    """Write corpus, tokenizer, config.json and run.yaml to `folder`, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    texts = corpus()
    with (folder / "corpus.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    end, pad = write_tokenizer(texts, folder)
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps({**MODEL, **special}, indent=2) + "\n", "utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "pad_token_id": pad}, indent=2) + "\n", "utf-8")
    (folder / "python-version.txt").write_text(platform.python_version() + "\n", "utf-8")
    TRAINING.save(folder / "run.yaml")
    print(f"{len(texts):,} functions, {sum(map(len, texts)):,} characters -> {folder}")


def corpus() -> list[str]:
    """The functions of the packages that are not the demo's, each once, in an order that the seed alone decides."""
    low, high = CORPUS_LINES
    functions = [function for function in stdlib.functions() if low <= function.num_lines <= high]
    demo_code = {function.code for function in functions if stdlib.is_demo_package(function.module) and function.code}
    texts = {f.source: None for f in functions if not stdlib.is_demo_package(f.module) and f.code not in demo_code}
    shuffled = list(texts)
    random.Random(0).shuffle(shuffled)
    return shuffled


def write_tokenizer(texts: list[str], folder: Path) -> tuple[int, int]:
    """Train a byte-level BPE on `texts` and save it with its chat template; the ids of the end and the padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [END, PAD, USER, ASSISTANT, SYSTEM]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=MODEL["max_position_embeddings"],
        clean_up_tokenization_spaces=False, extra_special_tokens=[USER, ASSISTANT, SYSTEM],
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast.eos_token_id, fast.pad_token_id


def train(folder: Path, target: Path) -> None:
    """Train from `folder` with the command line, export the last checkpoint to `target` and write its model card."""
    workspace = folder / "workspace"
    _megatrain("train", folder / "run.yaml", "--workspace", workspace)
    run = supervisor.list_runs(workspace)[0]
    checkpoint = supervisor.resume_point(run)
    shutil.rmtree(target, ignore_errors=True)
    _megatrain("export", run.folder, "--checkpoint", checkpoint.name, "--dtype", "bfloat16", "--target", target)
    evaluations = [event.data["loss"] for event in run.events() if event.kind == "eval"]
    python = (folder / "python-version.txt").read_text("utf-8").strip()
    (target / "README.md").write_text(model_card(run.steps()[-1], evaluations[-1], python), "utf-8")


def _megatrain(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "megatrain", *map(str, arguments)], cwd=ROOT, check=True)


def model_card(last: StepRow, eval_loss: float, python: str) -> str:
    """The text that says what the model is, how it came about, and under which terms."""
    return f"""---
language: [en, code]
library_name: transformers
pipeline_tag: text-generation
---

# MegaTrain demo model

A Llama of 7 million parameters (hidden size {MODEL["hidden_size"]}, {MODEL["num_hidden_layers"]} layers, context
{MODEL["max_position_embeddings"]}) for trying out MegaTrain without network and GPU. It writes text that looks like
Python and is good for nothing else.

- Pre-trained by MegaTrain's own engine from random weights: {last.step:,} steps of {TRAINING.train.global_batch_tokens:,} tokens,
  {last.epoch:.1f} passes, bf16. Loss at the end {last.loss:.3f}, on held-out functions {eval_loss:.3f} (nats per token).
- Data: the functions and docstrings of the standard library of Python {python},
  without the packages that the built-in demo data is made of, so that those are new to it.
- Tokenizer: byte-level BPE of {VOCAB_SIZE:,} tokens trained on the same text; `{END}` ends a document and a chat turn.
  The chat template's role tokens never occurred in pre-training.
- Made by `assets/make_demo_model.py` in MegaTrain's repository.

The standard library is Copyright (c) Python Software Foundation, used under the PSF License Agreement
(https://docs.python.org/3/license.html). The script, the tokenizer and the weights are under Apache-2.0, as far as they
are not derived from it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo model.")
    parser.add_argument("part", choices=("prepare", "train"))
    arguments = parser.parse_args()
    if arguments.part == "prepare":
        prepare(BUILD)
    else:
        train(BUILD, TARGET)


if __name__ == "__main__":
    main()
