"""Tiny tokenizers with hand-written chat templates, in the manner of the common model families.

Every byte is a token, unless merges are given, and every special token one: a mask can be read as text.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatrain.data.chat import Encoded

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
HEADER_ALWAYS = LLAMA3.replace("{% if add_generation_prompt %}", "").replace("{% endif %}", "")  # the first Llama 3 was published so
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Thinking is kept in the last turn only, and an empty block is written there when there was none (as Qwen3 does).
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set content = m['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.last %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OPEN_THINKING = THINKING.replace("{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
# An answer ends where the next turn begins; nothing is written behind the last one (as GLM-4 does).
ENDLESS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
MARKED = (  # the marks leave out the end token
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
PLAIN = (  # no special token but the tokenizer's own end token; the space before an answer belongs to the header
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'A: ' + m['content'] + eos_token }}"
    "{% else %}{{ 'Q: ' + m['content'] + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML

SPECIALS = {
    HEADER_ALWAYS: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    CHATML: ("<|im_start|>", "<|im_end|>"), THINKING: ("<|im_start|>", "<|im_end|>"), OPEN_THINKING: ("<|im_start|>", "<|im_end|>"),
    MARKED: ("<|im_start|>", "<|im_end|>"), LLAMA3: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    MISTRAL: ("[INST]", "[/INST]"), GEMMA: ("<start_of_turn>", "<end_of_turn>"), ENDLESS: ("<|user|>", "<|assistant|>", "<|system|>"),
}  # fmt: skip


def tokenizer(template: str | None = None, merges: Sequence[tuple[str, str]] = (), bos: bool = True, pad: str = "<pad>",
              eos: str | None = "</s>", flagged: bool = True):  # fmt: skip
    """Bytes, merges and special tokens. With `bos` a BOS token is put before every plain text, as LLaMA tokenizers do.

    `flagged` False adds the template's tokens without marking them as special, as some fine-tuned models do.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *alphabet, *(left + right for left, right in merges)]
    inner = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=list(merges), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<s>", "</s>", "<unk>"])
    inner.add_tokens([AddedToken(text, special=flagged, normalized=False) for text in SPECIALS.get(template or "", ())])
    if bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos, pad_token=pad, unk_token="<unk>")
    made.chat_template = template
    return made


def saved(folder: Path, template: str | None = None, **settings) -> Path:
    """A folder with the tokenizer, as a model folder has it."""
    tokenizer(template, **settings).save_pretrained(folder)
    return folder


def marked(tokens, encoded: Encoded) -> str:
    """The text of an example with each run of trained tokens in 〔brackets〕, token by token."""
    text, inside = "", False
    for index, is_trained in zip(encoded.ids, encoded.mask, strict=True):
        if is_trained != inside:
            text += "〔" if is_trained else "〕"
            inside = is_trained
        text += tokens.decode([index])
    return text + ("〕" if inside else "")


def chat(*contents: str, system: str = "") -> list[dict]:
    """Messages that take turns, the user first."""
    turns = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns
