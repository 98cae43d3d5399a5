"""A checkpoint becomes a folder that plain transformers loads with the weights that were trained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatrain import export as exporting
from megatrain.engine.checkpoint import BlockSnapshot, CheckpointWriter, file_states
from megatrain.engine.codecs import split_master
from megatrain.engine.events import Phase
from megatrain.errors import CheckpointError, ModelError
from megatrain.export import export
from megatrain.models.blocks import BlockLayout, layout_record
from megatrain.models.skeleton import Skeleton
from tests.families import FAMILIES, VOCAB_SIZE
from tests.reference import build_model


def block_states(layout: BlockLayout, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states of a block that was trained to the fp32 weights `state`."""
    weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    rest = torch.zeros(layout.numel_a, dtype=torch.int16)
    views = layout.weight_views(weights)
    for entry in layout.entries:
        place = slice(entry.offset, entry.offset + entry.numel)
        if entry.segment == "a" and layout.compute_dtype is torch.bfloat16:
            split_master(state[entry.name].reshape(-1), layout.segment_a(weights)[place], rest[place])
        else:
            views[entry.name].copy_(state[entry.name])
    for buffer in layout.buffers:
        if buffer.persistent:
            views[buffer.name].copy_(state[buffer.name])
    moments = {name: torch.zeros(layout.numel) for name in ("exp_avg", "exp_avg_sq")}
    return {"weights": weights, **moments} | ({"masters": rest} if layout.compute_dtype is torch.bfloat16 else {})


def checkpoint_of(model: PreTrainedModel, family: str, root: Path, precision: str = "bf16") -> Path:
    """What the engine would save of `model` (fp32) after 30 steps."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    layouts = Skeleton(FAMILIES[family](), dtype).layouts
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    blocks = [BlockSnapshot(b.name, lambda b=b: file_states(b, block_states(b, state)), lambda: None) for b in layouts]
    config = {
        "name": "Rhymes",
        "model": {"path": "/home/me/secret/tiny-model", "from_scratch": False},
        "data": {"path": "someone/rhymes", "sequence_length": 64},
        "train": {"learning_rate": 1e-4, "schedule": "cosine", "global_batch_tokens": 4096},
    }
    writer = CheckpointWriter(root, keep=1)
    writer.start(30, blocks, {"config": config, "precision": precision, "layouts": [layout_record(b) for b in layouts]})
    return Path(writer.wait().path)


def model_folder(family: str, folder: Path) -> Path:
    """The folder that a training started from: only its configuration and companions matter for an export."""
    FAMILIES[family]().save_pretrained(folder)
    return folder


def tokenizer_into(folder: Path) -> None:
    """A tokenizer of one token per byte of ASCII, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    raw = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    tokenizer.save_pretrained(folder)


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(ids).logits.float()


@pytest.mark.parametrize("family", ["llama_tied", "llama_untied", "gemma2", "gpt2", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_trained_weights_arrive_in_transformers(family: str, tmp_path: Path) -> None:
    trained = build_model(FAMILIES[family]())
    saved = checkpoint_of(trained, family, tmp_path / "checkpoints")
    source = model_folder(family, tmp_path / "model")
    phases: list[Phase] = []
    report = export(saved, source, tmp_path / "fp32", "fp32", progress=phases.append)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", attn_implementation="eager")
    assert exact.dtype == torch.float32
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in exact.state_dict().items())
    assert torch.equal(logits(exact), logits(trained))
    assert (report.step, report.loaded, report.answer) == (30, True, "")
    assert "no tokenizer" in report.notices[0]
    exported = [phase for phase in phases if phase.name == "export"]
    assert (exported[0].done, exported[-1].done) == (0, exported[-1].total)
    assert phases[-1].name == "verify"

    export(saved, source, tmp_path / "bf16", "bf16", try_it=False)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", attn_implementation="eager")
    layouts = Skeleton(FAMILIES[family](), torch.bfloat16).layouts
    for layout in layouts:  # what training computed with, bit for bit
        views = layout.weight_views(block_states(layout, trained.state_dict())["weights"])
        for entry in layout.entries:
            assert torch.equal(rounded.state_dict()[entry.name].float(), views[entry.name].float()), entry.name


def test_fp32_run_is_exported_in_both_formats(tmp_path: Path) -> None:
    trained = build_model(FAMILIES["qwen2"]())
    saved = checkpoint_of(trained, "qwen2", tmp_path / "checkpoints", "fp32")
    source = model_folder("qwen2", tmp_path / "model")
    for dtype in ("fp32", "bf16"):
        export(saved, source, tmp_path / dtype, dtype, try_it=False)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert all(torch.equal(t, trained.state_dict()[n].to(t.dtype)) for n, t in loaded.state_dict().items())


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> tuple[Path, Path]:
    """(checkpoint, model folder) of a model that finds every token equally likely, so that greedy decoding takes token 0."""
    model = build_model(FAMILIES["llama_untied"](), perturb=0.0)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    source = model_folder("llama_untied", tmp_path / "model")
    tokenizer_into(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6, "do_sample": True}))
    (source / "LICENSE.txt").write_text("Do as you like.")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    (source / "run_me.py").write_text("raise SystemExit")
    return checkpoint_of(model, "llama_untied", tmp_path / "checkpoints"), source


def test_companions_come_along_and_an_answer_is_tried(with_tokenizer: tuple[Path, Path], tmp_path: Path) -> None:
    saved, source = with_tokenizer
    report = export(saved, source, tmp_path / "out", facts={"Held-out loss": "1.589 before, 1.552 after"})
    names = {
        "README.md",
        "LICENSE.txt",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert names | {"tokenizer_config.json"} == set(report.files)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 0]
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    chat = [{"role": "user", "content": "Hi there"}]
    assert new.apply_chat_template(chat, tokenize=False) == old.apply_chat_template(chat, tokenize=False)
    assert report.loaded
    assert (report.answer, report.ends_itself, report.notices) == ("", True, ())
    assert report.num_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def test_the_template_of_the_training_takes_the_place_of_the_models_own(with_tokenizer: tuple[Path, Path], tmp_path: Path) -> None:
    saved, source = with_tokenizer
    export(saved, source, tmp_path / "own", try_it=False, chat_template="{{ 'ours' }}")
    assert "ours" in (tmp_path / "own" / "chat_template.jinja").read_text("utf-8")
    (source / "chat_template.jinja").unlink()
    export(saved, source, tmp_path / "ours", try_it=False, chat_template="{{ 'ours' }}")
    messages = [{"role": "user", "content": "Hi"}]
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").apply_chat_template(messages, tokenize=False) == "ours"


def test_model_that_does_not_stop_is_reported(with_tokenizer: tuple[Path, Path], tmp_path: Path) -> None:
    saved, source = with_tokenizer
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    report = export(saved, source, tmp_path / "out")
    assert report.ends_itself is False
    assert "did not end its answer within 64 tokens" in report.notices[0]


def test_model_card_says_what_was_trained(with_tokenizer: tuple[Path, Path], tmp_path: Path) -> None:
    saved, source = with_tokenizer
    export(saved, source, tmp_path / "out", facts={"Held-out loss": "1.589 before, 1.552 after"}, try_it=False)
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "datasets:\n- someone/rhymes" in card
    assert "# Rhymes" in card
    lines = ["| Base model | tiny-model |", "| Optimizer steps | 30 |", "| Tokens per step | 4,096 |", "| Learning rate | 0.0001, cosine |"]
    assert all(line in card for line in [*lines, "| Held-out loss | 1.589 before, 1.552 after |"])
    assert "secret" not in card  # folders of this machine are nobody's business


def test_too_little_memory_to_load_is_told(with_tokenizer: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_has_memory", lambda num_bytes: False)
    report = export(*with_tokenizer, tmp_path / "out")
    assert not report.loaded
    assert "free memory" in report.notices[0]


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved = checkpoint_of(build_model(FAMILIES["llama_tied"]()), "llama_tied", tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        export(saved, model_folder("llama_untied", tmp_path / "model"), tmp_path / "out")
    with pytest.raises(ModelError, match="Unknown format"):
        export(saved, tmp_path / "model", tmp_path / "out", "int3")
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    saved = checkpoint_of(build_model(FAMILIES["llama_tied"]()), "llama_tied", tmp_path / "checkpoints")
    path = saved / "block-0002.safetensors"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    source = model_folder("llama_tied", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"block-0002\.safetensors is damaged"):
        export(saved, source, tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []


def test_what_reads_back_differently_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = checkpoint_of(build_model(FAMILIES["llama_tied"]()), "llama_tied", tmp_path / "checkpoints")
    original = exporting._complete

    def damage(folder: Path, **rest: object) -> None:
        original(folder, **rest)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))

    monkeypatch.setattr(exporting, "_complete", damage)
    with pytest.raises(ModelError, match="read back differently"):
        export(saved, model_folder("llama_tied", tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint, model folder) of a run; read only."""
    folder = tmp_path_factory.mktemp("tied")
    saved = checkpoint_of(build_model(FAMILIES["llama_tied"]()), "llama_tied", folder / "checkpoints")
    return saved, model_folder("llama_tied", folder / "model")


def refusal(saved: Path, source: Path, target: Path) -> str:
    """Message and hint of an export that must not begin."""
    phases: list[Phase] = []
    with pytest.raises(ModelError) as error:
        export(saved, source, target, try_it=False, progress=phases.append)
    assert phases == []
    assert error.value.message.startswith(f"{target} cannot be exported to: ")
    return f"{error.value.message} {error.value.hint}".removeprefix(f"{target} cannot be exported to: ")


def test_a_target_that_cannot_be_is_named_with_what_to_do(tied: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    for name in ("d", "c", "b", "a"):
        (tmp_path / "full" / name).write_text("mine")
    assert refusal(*tied, tmp_path / "file") == "it is a file, not a folder. Give a folder that does not exist yet, or remove the file."
    assert refusal(*tied, tmp_path / "full") == (
        "it exists already and is not empty (a, b, c, …). Give a folder that does not exist yet, or empty it."
    )
    below = refusal(*tied, tmp_path / "file" / "out")
    assert below == f"{tmp_path / 'file'} is a file, not a folder. Give a folder that does not exist yet."
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list((tmp_path / "full").iterdir())) == 4


@pytest.mark.parametrize("inside", ["", "new", "step-00000030", "step-00000030/hf", "../checkpoints/x"])
def test_nothing_is_exported_among_the_checkpoints(inside: str, tied: tuple[Path, Path]) -> None:
    saved, source = tied
    before = sorted(saved.parent.rglob("*"))
    root = saved.parent
    expected = f"it lies in {root}, where the run keeps its checkpoints and removes old ones. Give a folder outside of it."
    assert refusal(saved, source, root / inside) == expected
    assert sorted(root.rglob("*")) == before


def test_a_target_that_may_not_be_written_is_named(tied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting.os, "access", lambda path, mode: False)  # the super-user may write anywhere
    assert refusal(*tied, tmp_path / "new" / "out") == f"{tmp_path} may not be written to. Give a folder that you may write to."


def test_existing_folder_is_kept_and_an_empty_one_used(tmp_path: Path) -> None:
    saved = checkpoint_of(build_model(FAMILIES["llama_tied"]()), "llama_tied", tmp_path / "checkpoints")
    source = model_folder("llama_tied", tmp_path / "model")
    (tmp_path / "out").mkdir()
    export(saved, source, tmp_path / "out", try_it=False)
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(ModelError, match="exists already"):
        export(saved, source, tmp_path / "out", try_it=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    shutil.rmtree(tmp_path / "out")
