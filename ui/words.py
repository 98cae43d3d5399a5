"""The words of the page, by key. One module of texts per language under texts/, all with the same keys."""

from ui.texts.en import TEXTS


def text(key: str, /, **values: object) -> str:
    """The text of `section.name`, with `{placeholders}` filled in. An unknown key is an error, never an empty label."""
    section, _, name = key.partition(".")
    template = TEXTS[section][name]
    return template.format(**values) if values else template


def section(name: str) -> dict[str, str]:
    """All texts of one section, for a widget that fills in its own placeholders."""
    return dict(TEXTS[name])
