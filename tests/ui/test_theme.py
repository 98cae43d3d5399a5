"""Colours of both modes can be told apart and read: WCAG AA, computed from the stylesheet itself."""

import re

import pytest

from ui.theme import STATIC

SHEET = (STATIC / "style.css").read_text("utf-8")


def variables(selector):
    block = re.search(re.escape(selector) + r" \{([^}]*)\}", SHEET)
    return dict(re.findall(r"(--mt-[a-z-]+): (#[0-9a-f]{3,6});", block[1]))


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [":root", ".dark"])
def test_text_can_be_read(mode):
    colours = variables(mode)
    for name in ("text", "muted", "accent", "ok", "warn", "bad", "idle"):
        for ground in ("bg", "card"):
            assert contrast(colours[f"--mt-{name}"], colours[f"--mt-{ground}"]) >= 4.5, (name, ground)
    for tone in ("ok", "warn", "bad", "idle", "accent"):
        assert contrast(colours[f"--mt-{tone}"], colours[f"--mt-{tone}-soft"]) >= 4.5, tone


@pytest.mark.parametrize("mode", [":root", ".dark"])
def test_lines_of_charts_can_be_seen(mode):
    colours = variables(mode)
    for name in ("blue", "orange", "green", "pink", "yellow", "grey", "purple", "sky"):
        assert contrast(colours[f"--mt-{name}"], colours["--mt-card"]) >= 3.0, name


def test_both_modes_set_the_same_colours():
    assert variables(".dark").keys() == variables(":root").keys()


def test_styles_load_nothing():
    for path in STATIC.glob("*.css"):
        for address in re.findall(r"url\(([^)]*)\)", path.read_text("utf-8")):
            assert address.strip("\"'").startswith("data:")
