"""Chat templates: the tokenizer's own, one by name, or one that the user wrote.

The named ones write the formats that the model families document, without tools. They are for tokenizers that come
without a template; their special tokens should be in the tokenizer's vocabulary (what is not is written as plain text).
"""

from pathlib import Path
from typing import Any

from megatrain.errors import DataError

# Used for conversations when a tokenizer has no template. Each answer ends with the tokenizer's end token.
FALLBACK_TEMPLATE = (
    "{{ bos_token if bos_token is defined and bos_token else '' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '### Assistant:\\n' }}"
    "{% generation %}{{ message.content + (eos_token if eos_token is defined and eos_token else '') }}{% endgeneration %}{{ '\\n\\n' }}"
    "{%- else %}{{ '### User:\\n' + message.content + '\\n\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{%- endif %}"
)
NAMED = {
    "plain": FALLBACK_TEMPLATE,
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' "
        "+ message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "phi": (
        "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
}


def chosen_template(choice: str | None, tokenizer: Any) -> tuple[str, str | None]:
    """(kind, template): `tokenizer` and None for its own, `fallback` where it has none, else `chosen`. DataError if there is none."""
    choice = (choice or "").strip()
    if not choice:
        return ("tokenizer", None) if tokenizer.chat_template else ("fallback", FALLBACK_TEMPLATE)
    if "{" in choice:
        return "chosen", _checked(choice, "the template given")
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    found = own.get(choice) or NAMED.get(choice.lower())
    if found:
        return "chosen", _checked(found, f"the template `{choice}`")
    path = Path(choice).expanduser()
    try:
        return "chosen", _checked(path.read_text("utf-8"), path.name)
    except (OSError, ValueError) as error:
        known = ", ".join([*own, *NAMED])
        hint = f"Known are {known}; or give a template in Jinja, or its file."
        raise DataError(f"There is no chat template `{choice[:80]}`.", hint) from error


def _checked(template: str, name: str) -> str:
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template, bos_token="", eos_token="")
    except jinja2.TemplateSyntaxError as error:
        problem = f"{name[0].upper()}{name[1:]} is not valid Jinja: {error.message} in line {error.lineno}."
        raise DataError(problem, "Correct it, or take the tokenizer's own.") from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        pass  # it may refuse this conversation and take others
    return template
