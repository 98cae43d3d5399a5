"""The built-in demo model, and the first half of the script that makes it."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.data import stdlib

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "assets" / "demo-model"
MESSAGES = [{"role": "user", "content": "Return x."}, {"role": "assistant", "content": "def f(x):\n    return x"}]


def script():
    spec = importlib.util.spec_from_file_location("make_demo_model", ROOT / "assets" / "make_demo_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What `make_demo_model.py prepare` writes."""
    folder = tmp_path_factory.mktemp("demo") / "build"
    script().prepare(folder)
    return folder


def check_tokenizer(tokenizer):
    text = 'Hello  world 12345\n\tdef f(x): return "x"\n    # ünï 😀 日本\n\n\n'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer.apply_chat_template(MESSAGES)["input_ids"]
    prompt = tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids[len(prompt) :]) == MESSAGES[1]["content"] + "<|end|>\n"
    assert tokenizer.convert_tokens_to_ids("<|end|>") == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_corpus_holds_nothing_of_the_demos_packages(prepared):
    texts = [json.loads(line)["text"] for line in (prepared / "corpus.jsonl").read_text("utf-8").splitlines()]
    assert len(texts) == len(set(texts)) > 5000
    demo = {function.source for function in stdlib.functions() if stdlib.is_demo_package(function.module) and function.num_lines >= 4}
    assert len(demo) > 1000
    assert demo.isdisjoint(texts)


def test_the_tokenizer_keeps_every_byte_and_its_template_ends_turns(prepared):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared)
    assert len(tokenizer) == script().VOCAB_SIZE
    check_tokenizer(tokenizer)


def test_the_runs_configuration_is_valid(prepared):
    config = RunConfig.load(prepared / "run.yaml")
    assert config.model.from_scratch
    assert config.data.format == "text"


def test_the_model_in_the_repository_is_small_and_loads_in_plain_transformers():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) <= 16_000_000
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 8_000_000
    check_tokenizer(tokenizer)
    assert (DEMO_MODEL / "README.md").is_file()


def test_the_model_in_the_repository_has_learnt_python():
    """On a package that it was not trained on its loss is far below chance (8.3 nats per token)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = [function.source for function in stdlib.functions() if function.module == "asyncio/events.py" and function.num_lines > 10]
    losses = []
    for text in texts[:8]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    assert sum(losses) / len(losses) < 3.5
