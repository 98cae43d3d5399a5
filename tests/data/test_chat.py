"""Golden masks, token by token: what stands in 〔 〕 is trained, nothing else is."""


import pytest

from megatrain.data.adapt import REASONING_UNSEEN, SYSTEM_IN_USER, TOOLS_AS_TEXT, TOOLS_UNSEEN
from megatrain.data.chat import Encoder, load_tokenizer
from megatrain.data.files import Row
from megatrain.data.formats import BadRow, Conversation, Pair, Text, read_row
from tests.data import tiny
from tests.data.tiny import chat, marked


def conversation(messages: list[dict]) -> Conversation:
    return Conversation(messages, [message["role"] == "assistant" for message in messages])


TWO_TURNS = chat("Hi", "Yo", "Ok?", "No.", system="Be")
GOLDEN = {
    "chatml": (tiny.CHATML, "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n〔Yo<|im_end|>〕\n"
                            "<|im_start|>user\nOk?<|im_end|>\n<|im_start|>assistant\n〔No.<|im_end|>〕\n"),
    "llama3": (tiny.LLAMA3, "<s><|start_header_id|>system<|end_header_id|>\n\nBe<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi"
                            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n〔Yo<|eot_id|>〕<|start_header_id|>user<|end_header_id|>"
                            "\n\nOk?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n〔No.<|eot_id|>〕"),
    "header always": (tiny.HEADER_ALWAYS,
                      "<s><|start_header_id|>system<|end_header_id|>\n\nBe<|eot_id|><|start_header_id|>user<|end_header_id|>"
                      "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n〔Yo<|eot_id|>〕<|start_header_id|>user"
                      "<|end_header_id|>\n\nOk?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n〔No.<|eot_id|>〕"),
    "mistral": (tiny.MISTRAL, "<s>[INST] Be\n\nHi [/INST]〔 Yo</s>〕[INST] Ok? [/INST]〔 No.</s>〕"),
    "gemma": (tiny.GEMMA, "<s><start_of_turn>user\nBe\n\nHi<end_of_turn>\n<start_of_turn>model\n〔Yo<end_of_turn>〕\n"
                          "<start_of_turn>user\nOk?<end_of_turn>\n<start_of_turn>model\n〔No.<end_of_turn>〕\n"),
    "thinking": (tiny.THINKING,
                 "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n〔Yo<|im_end|>〕\n"
                                "<|im_start|>user\nOk?<|im_end|>\n<|im_start|>assistant\n〔<think>\n\n</think>\n\nNo.<|im_end|>〕\n"),
    "open thinking": (tiny.OPEN_THINKING,
                      "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n〔Yo<|im_end|>〕\n"
                      "<|im_start|>user\nOk?<|im_end|>\n<|im_start|>assistant\n<think>\n〔\n</think>\n\nNo.<|im_end|>〕\n"),
    "endless": (tiny.ENDLESS, "<|system|>\nBe<|user|>\nHi<|assistant|>\n〔Yo<|user|>〕\nOk?<|assistant|>\n〔No.</s>〕"),
    "marked": (tiny.MARKED, "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n〔Yo<|im_end|>〕\n"
                            "<|im_start|>user\nOk?<|im_end|>\n<|im_start|>assistant\n〔No.<|im_end|>〕\n"),
    "plain": (tiny.PLAIN, "Q: Be\nQ: Hi\nA: 〔Yo</s>〕Q: Ok?\nA: 〔No.</s>〕"),
    "none": (None, "<s>Be\n\n### User:\nHi\n\n### Assistant:\n〔Yo</s>〕\n\n### User:\nOk?\n\n### Assistant:\n〔No.</s>〕\n\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_every_answer_and_its_end_token_is_trained_and_nothing_else(name: str) -> None:
    template, golden = GOLDEN[name]
    tokens = tiny.tokenizer(template)
    assert marked(tokens, Encoder(tokens).encode(conversation(TWO_TURNS))) == golden


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("settings", [{"pad": "</s>"}, {"flagged": False}], ids=["pad is eos", "tokens not flagged as special"])
def test_masks_do_not_depend_on_what_an_id_is_called(name: str, settings: dict) -> None:
    template, golden = GOLDEN[name]
    tokens = tiny.tokenizer(template, **settings)
    assert marked(tokens, Encoder(tokens).encode(conversation(TWO_TURNS))) == golden


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bos_token_is_never_doubled(name: str) -> None:
    ids = Encoder(tiny.tokenizer(GOLDEN[name][0], bos=True)).encode(conversation(TWO_TURNS)).ids
    assert ids.count(1) == (GOLDEN[name][1].count("<s>"))


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "marked"])  # which has no generation prompt
def test_a_prompt_is_the_beginning_of_what_training_saw(name: str) -> None:
    tokens = tiny.tokenizer(GOLDEN[name][0])
    encoder = Encoder(tokens)
    messages = chat("Hi", "Yo", "Ok?")
    prompt = encoder.encode_prompt(messages)
    whole = encoder.encode(conversation([*messages, {"role": "assistant", "content": "No."}]))
    assert prompt == whole.ids[: len(prompt)]
    assert not any(whole.mask[len(prompt) - 1 : len(prompt)])
    assert whole.mask[len(prompt)] or name == "mistral"


def test_an_answer_that_merges_with_its_header_is_found_by_characters() -> None:
    tokens = tiny.tokenizer(tiny.PLAIN, merges=[("Ġ", "Y"), ("ĠY", "o")])
    encoded = Encoder(tokens).encode(conversation(chat("Hi", "Yo", "Ok?", "Yo!")))
    assert marked(tokens, encoded) == "Q: Hi\nA:〔 Yo</s>〕Q: Ok?\nA:〔 Yo!</s>〕"


def test_an_answer_of_white_space_and_line_feeds_keeps_them() -> None:
    tokens = tiny.tokenizer(tiny.CHATML)
    assert marked(tokens, Encoder(tokens).encode(conversation(chat("Hi", "\n\nYo \n")))).endswith("assistant\n〔\n\nYo \n<|im_end|>〕\n")


def test_an_answer_that_ends_in_an_unknown_character_still_gets_its_end_token(glass_folder) -> None:
    tokens = load_tokenizer(glass_folder)
    tokens.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for example in (Pair("Alice said: ", "yes 😀"), conversation(chat("Alice said: ", "yes 😀"))):
        encoded = Encoder(tokens).encode(example)
        assert encoded.ids[-2:] == [tokens.unk_token_id, tokens.eos_token_id]
        assert encoded.mask[-2:] == [True, True]


def test_a_turn_that_its_row_excludes_is_not_trained() -> None:
    for template in (tiny.CHATML, tiny.MARKED):
        tokens = tiny.tokenizer(template)
        encoded = Encoder(tokens).encode(Conversation(chat("Hi", "Yo", "Ok?", "No."), [False, False, False, True]))
        assert "assistant\nYo<|im_end|>" in marked(tokens, encoded)
        assert "〔No.<|im_end|>〕" in marked(tokens, encoded)


def test_a_conversation_that_the_assistant_begins() -> None:
    tokens = tiny.tokenizer(tiny.CHATML)
    messages = [{"role": "assistant", "content": "Welcome"}, *chat("Hi", "Yo")]
    assert marked(tokens, Encoder(tokens).encode(conversation(messages))).startswith("<|im_start|>assistant\n〔Welcome<|im_end|>〕\n")


def test_reasoning_is_trained_where_the_template_writes_it() -> None:
    tokens = tiny.tokenizer(tiny.THINKING)
    messages = chat("Hi", "Yo")
    messages[1]["reasoning_content"] = "Hm"
    assert marked(tokens, Encoder(tokens).encode(conversation(messages))).endswith("〔<think>\nHm\n</think>\n\nYo<|im_end|>〕\n")


def test_tool_calls_and_results_are_written_as_text_where_a_template_has_no_place_for_them() -> None:
    tokens = tiny.tokenizer(tiny.MISTRAL)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two"}]  # fmt: skip
    encoder = Encoder(tokens)
    text = marked(tokens, encoder.encode(conversation(messages)))
    assert '〔 <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call></s>〕[INST] 2 [/INST]〔 Two</s>〕' in text
    assert dict(encoder.notes) == {TOOLS_AS_TEXT: 1}


def test_what_a_template_does_not_write_is_said() -> None:
    encoder = Encoder(tiny.tokenizer(tiny.CHATML))
    messages = chat("Hi", "Yo")
    messages[1]["reasoning_content"] = "Hm"
    encoder.encode(Conversation(messages, [False, True], [{"type": "function", "function": {"name": "f"}}]))
    assert set(encoder.notes) == {TOOLS_UNSEEN, REASONING_UNSEEN}


def test_a_system_prompt_moves_only_where_the_template_refuses_it() -> None:
    for template, moved in ((tiny.GEMMA, {SYSTEM_IN_USER: 1}), (tiny.LLAMA3, {})):
        encoder = Encoder(tiny.tokenizer(template))
        encoder.encode(conversation(TWO_TURNS))
        assert dict(encoder.notes) == moved


def test_what_a_template_refuses_is_a_reason_in_its_own_words() -> None:
    with pytest.raises(BadRow, match="the chat template refuses the conversation: roles must alternate"):
        Encoder(tiny.tokenizer(tiny.MISTRAL)).encode(conversation([*chat("Hi"), *chat("Ho", "Yo")]))


def test_a_template_that_swallows_a_turn_is_no_silent_loss() -> None:
    deaf = "{% for m in messages if m['role'] != 'user' %}{{ m['content'] + eos_token }}{% endfor %}"
    with pytest.raises(BadRow, match="leaves out a turn"):
        Encoder(tiny.tokenizer(deaf)).encode(conversation(chat("Hi", "Yo")))


def test_the_day_of_the_run_changes_no_token() -> None:
    tokens = tiny.tokenizer(tiny.DATED)
    text = marked(tokens, Encoder(tokens).encode(conversation(chat("Hi", "Yo"))))
    assert text.startswith("Today is 01 Jan 2025\n")


def test_a_prompt_and_completion_become_a_conversation_only_with_a_template() -> None:
    pair = read_row(Row("", {"prompt": "def f():\n", "completion": "    return 1\n"}), "prompt_completion")
    plain, templated = tiny.tokenizer(), tiny.tokenizer(tiny.CHATML)
    assert marked(plain, Encoder(plain).encode(pair)) == "<s>def f():\n〔    return 1\n</s>〕"
    assert marked(templated, Encoder(templated).encode(pair)).endswith("<|im_start|>assistant\n〔    return 1\n<|im_end|>〕\n")


def test_a_completion_that_merges_with_its_prompt_is_trained_whole() -> None:
    tokens = tiny.tokenizer(merges=[("a", "b")])
    assert marked(tokens, Encoder(tokens).encode(Pair("xa", "bc"))) == "<s>x〔abc</s>〕"


def test_everything_trains_prompts_too() -> None:
    for example in (conversation(TWO_TURNS), Pair("a", "b"), Text("ab")):
        encoded = Encoder(tiny.tokenizer(tiny.CHATML), train_on="everything").encode(example)
        assert all(encoded.mask)


def test_a_text_begins_and_ends_once_however_many_sections_it_is_read_in() -> None:
    tokens = tiny.tokenizer()
    encoder = Encoder(tokens)
    sections = [Text("ab", ends=False), Text("cd", begins=False, ends=False), Text("ef", begins=False)]
    assert [marked(tokens, encoded) for encoded in encoder.encode_all(sections)] == ["〔<s>ab〕", "〔cd〕", "〔ef</s>〕"]
    assert marked(tokens, encoder.encode(Text("ab"))) == "〔<s>ab</s>〕"


def test_one_bad_example_leaves_the_others_of_its_batch_alone() -> None:
    encoder = Encoder(tiny.tokenizer(tiny.MISTRAL))
    results = encoder.encode_all([Text("a"), conversation([*chat("Hi"), *chat("Ho", "Yo")]), conversation(chat("Hi", "Yo")), Text("b")])
    assert [type(result).__name__ for result in results] == ["Encoded", "BadRow", "Encoded", "Encoded"]


def test_a_real_chat_tokenizer(smollm2_folder) -> None:
    tokens = load_tokenizer(smollm2_folder)
    encoded = Encoder(tokens).encode(conversation(chat("What is 2+2?", "It is 4.", "And 3+3?", "6")))
    assert marked(tokens, encoded) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n〔It is 4.<|im_end|>〕\n"
        "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n〔6<|im_end|>〕\n"
    )
    assert tokens.pad_token_id == tokens.eos_token_id
