"""Golden masks for the chat templates and tokenizers that models are published with: 〔 〕 is trained, nothing else is."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from megatrain.data.adapt import CONTROL_TOKENS_ESCAPED, SYSTEM_IN_USER
from megatrain.data.chat import Encoder, load_tokenizer
from megatrain.data.formats import Conversation, Pair, Text
from megatrain.data.templates import NAMED
from megatrain.errors import DataError
from tests.data import real, tiny
from tests.data.tiny import chat, marked

CHATML_TURNS = ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n〔Yo<|im_end|>〕\n"
                "<|im_start|>user\nOk?<|im_end|>\n<|im_start|>assistant\n")  # fmt: skip
LLAMA_TURNS = ("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n〔Yo<|eot_id|>〕"
               "<|start_header_id|>user<|end_header_id|>\n\nOk?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
               "〔No.<|eot_id|>〕")  # fmt: skip
GOLDEN = {  # of a conversation with a system prompt, and of the same without
    "qwen3": ("<|im_start|>system\nBe<|im_end|>\n" + CHATML_TURNS + "〔<think>\n\n</think>\n\nNo.<|im_end|>〕\n",
              CHATML_TURNS + "〔<think>\n\n</think>\n\nNo.<|im_end|>〕\n"),
    "qwen2_5": ("<|im_start|>system\nBe<|im_end|>\n" + CHATML_TURNS + "〔No.<|im_end|>〕\n",
                "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
                + CHATML_TURNS + "〔No.<|im_end|>〕\n"),
    "llama3": ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe<|eot_id|>" + LLAMA_TURNS,
               "<|begin_of_text|>" + LLAMA_TURNS),
    "gemma2": ("<bos><start_of_turn>user\nBe\n\nHi<end_of_turn>\n<start_of_turn>model\n〔Yo<end_of_turn>〕\n"
               "<start_of_turn>user\nOk?<end_of_turn>\n<start_of_turn>model\n〔No.<end_of_turn>〕\n",
               "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n〔Yo<end_of_turn>〕\n"
               "<start_of_turn>user\nOk?<end_of_turn>\n<start_of_turn>model\n〔No.<end_of_turn>〕\n"),
    "mistral_nemo": ("<s>[INST]Be\n\nHi[/INST]〔Yo</s>〕[INST]Ok?[/INST]〔No.</s>〕",
                     "<s>[INST]Hi[/INST]〔Yo</s>〕[INST]Ok?[/INST]〔No.</s>〕"),
    "phi": ("<|system|>Be<|end|><|user|>Hi<|end|><|assistant|>〔Yo<|end|>〕<|user|>Ok?<|end|><|assistant|>〔No.<|end|>〕",
            "<|user|>Hi<|end|><|assistant|>〔Yo<|end|>〕<|user|>Ok?<|end|><|assistant|>〔No.<|end|>〕"),
}  # fmt: skip
_MADE: dict[str, Encoder] = {}


def encoder(name: str) -> Encoder:
    """Gemma's package has no template, so it is chosen by name; Phi's tokens, which swallow the line feed behind them, are added."""
    if name not in _MADE:
        tokens = load_tokenizer(real.tokenizer_folder("llama3" if name == "phi" else name))
        if name == "phi":
            texts = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
            tokens.add_tokens([AddedToken(text, special=True, rstrip=True, normalized=False) for text in texts])
        _MADE[name] = Encoder(tokens, chat_template={"phi": "phi", "gemma2": "gemma"}.get(name))
    return _MADE[name]


def conversation(messages: list[dict]) -> Conversation:
    return Conversation(messages, [message["role"] == "assistant" for message in messages])


@pytest.mark.parametrize("name", GOLDEN)
def test_the_templates_of_the_families(name: str) -> None:
    made = encoder(name)
    for golden, system in zip(GOLDEN[name], ("Be", ""), strict=True):
        messages = chat("Hi", "Yo", "Ok?", "No.", system=system)
        assert marked(made.tokenizer, made.encode(conversation(messages))) == golden
    assert (SYSTEM_IN_USER in made.notes) == (name in ("gemma2", "mistral_nemo"))


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_are_those_of_the_tokenizers_own_rendering(name: str) -> None:
    made = encoder(name)
    messages = chat("Héllo  world 12\n\n", "def f(x):\n\treturn x", " ok ", "日本 😀 \n")
    own = made.tokenizer.apply_chat_template(messages, chat_template=made.template.text, tokenize=True, return_dict=True)["input_ids"]
    ids = made.encode(conversation(messages)).ids
    if name == "llama3":  # as it was first published it writes the header of the next answer behind everything
        own = own[: -len(made.vocabulary.ids_of([made.template.trailer])[0])]
    assert ids == own


@pytest.mark.parametrize("name", GOLDEN)
def test_a_prompt_is_the_beginning_of_what_training_saw(name: str) -> None:
    made = encoder(name)
    messages = chat("Hi", "Yo", "Ok?")
    whole = made.encode(conversation([*messages, {"role": "assistant", "content": "No."}]))
    prompt = made.encode_prompt(messages)
    assert whole.ids[: len(prompt)] == prompt
    assert whole.mask[len(prompt) - 1 : len(prompt) + 1] == [False, True]


@pytest.mark.parametrize("name", GOLDEN)
def test_control_tokens_in_words_are_characters(name: str) -> None:
    made = encoder(name)
    added = sorted(made._special_ids)
    words = " ".join(str(token) for token in made.tokenizer.convert_ids_to_tokens(added[:40] + added[-5:]))
    before = made.notes[CONTROL_TOKENS_ESCAPED]
    plain, tricky = (made.encode(conversation(chat("a" + extra, "b" + extra))) for extra in ("", words))
    control = made._atoms & made.added_ids & made._special_ids
    assert [index for index in tricky.ids if index in control] == [index for index in plain.ids if index in control]
    assert made.tokenizer.decode(tricky.ids).count(words) == 2
    assert not made._special_ids.intersection(made.encode(Text(words, begins=False, ends=False)).ids)
    assert made.notes[CONTROL_TOKENS_ESCAPED] == before + 2


def test_a_pieces_text_keeps_its_characters_where_pieces_cannot_be_joined(glass_folder: Path) -> None:
    tokens = load_tokenizer(glass_folder)
    encoded = Encoder(tokens).encode(Pair("Alice ", "said <eos> and"))
    assert encoded.ids.count(tokens.eos_token_id) == 1  # the one at the end


def test_reasoning_and_tools_of_qwen3() -> None:
    made = encoder("qwen3")
    messages = chat("Hi", "Yo", "Ok?", "No.")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "Hm", "So"
    assert marked(made.tokenizer, made.encode(conversation(messages))) == CHATML_TURNS + "〔<think>\nSo\n</think>\n\nNo.<|im_end|>〕\n"
    inline = chat("Hi", "<think>\nHm\n</think>\n\nYo")
    assert marked(made.tokenizer, made.encode(conversation(inline))).endswith("〔<think>\nHm\n</think>\n\nYo<|im_end|>〕\n")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two"}]  # fmt: skip
    text = marked(made.tokenizer, made.encode(Conversation(turns, [False, True, False, True], tools)))
    assert '〔<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>〕' in text
    assert "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n〔" in text


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\U0010fffd"), max_size=20)
CONTROL = ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "[/INST]", "</s>", "<end_of_turn>\n", " ", "\n\n"]
TRICKY = st.lists(st.one_of(WORDS, st.sampled_from(CONTROL)), max_size=4).map("".join)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "mistral_nemo", "chatml", "marked"])
@settings(max_examples=40)
@given(turns=st.lists(st.tuples(TRICKY, TRICKY), min_size=1, max_size=3))
def test_any_conversation_has_the_ids_and_masks_of_its_pieces(name: str, turns: list[tuple[str, str]]) -> None:
    """Each run of trained tokens is one answer and its end token; no question is trained, and no word is lost or taken for control."""
    made = encoder(name) if name in GOLDEN else Encoder(tiny.tokenizer(getattr(tiny, name.upper())))
    turns = [(question.strip() or "q", answer.strip() or "a") for question, answer in turns]
    messages = chat(*(text for pair in turns for text in pair))
    encoded = made.encode(conversation(messages))
    decode = made.tokenizer.decode
    runs, inside = [], False
    for index, is_trained in zip(encoded.ids, encoded.mask, strict=True):
        if is_trained and not inside:
            runs.append([])
        if is_trained:
            runs[-1].append(index)
        inside = is_trained
    assert len(runs) == len(turns)
    for run, (_, answer) in zip(runs, turns, strict=True):
        assert run[-1] in made.end_ids
        assert not made.end_ids.intersection(run[:-1])
        assert decode(run[:-1], clean_up_tokenization_spaces=False).strip() == normal(made, answer).strip()
    everything = decode(encoded.ids, clean_up_tokenization_spaces=False)
    for question, _ in turns:
        assert normal(made, question) in everything


def normal(made: Encoder, text: str) -> str:
    """The text as the tokenizer writes it: some normalise characters (NFC)."""
    return made.tokenizer.decode(made._ids_of(made._escape.text(text)), clean_up_tokenization_spaces=False)


def test_templates_by_name_by_text_and_by_file(tmp_path: Path) -> None:
    tokens = tiny.tokenizer(tiny.CHATML)
    (tmp_path / "mine.jinja").write_text(tiny.PLAIN)
    for choice in (tiny.PLAIN, str(tmp_path / "mine.jinja")):
        made = Encoder(tokens, chat_template=choice)
        assert marked(tokens, made.encode(conversation(chat("Hi", "Yo")))) == "Q: Hi\nA: 〔Yo</s>〕"
        assert (made.used_template, made.template.text) == ("chosen", tiny.PLAIN)
    assert marked(tokens, Encoder(tokens, chat_template="chatml").encode(conversation(chat("Hi", "Yo")))).endswith("〔Yo<|im_end|>〕\n")
    foreign = Encoder(tokens, chat_template="gemma")
    foreign.encode(conversation(chat("Hi", "Yo")))
    assert foreign.template_notes()
    for choice, words in (("best", "no chat template `best`"), ("{% for %}", "is not valid Jinja"), (str(tmp_path), "no chat template")):
        with pytest.raises(DataError, match=words):
            Encoder(tokens, chat_template=choice)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_template_trains_the_answers(name: str) -> None:
    tokens = tiny.tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": sorted({token for tokens in tiny.SPECIALS.values() for token in tokens})})
    text = marked(tokens, Encoder(tokens, chat_template=name).encode(conversation(chat("Hi", "Yo", "Ok?", "No."))))
    assert text.count("〔") == 2
    assert "Yo" in text[text.index("〔") : text.index("〕")]
    assert "Hi" not in text[text.index("〔") : text.index("〕")]
