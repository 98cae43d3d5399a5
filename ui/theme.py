"""Colours, type and layout. Gradio's own variables carry the theme; style.css and widgets.css add the rest.

Contrast is at least 4.5:1 for text and 3:1 for lines in both modes. Fonts are the system's; nothing is loaded.
"""

from pathlib import Path

import gradio as gr

STATIC = Path(__file__).parent / "static"
CSS = "\n".join((STATIC / name).read_text("utf-8") for name in ("style.css", "widgets.css", "form.css", "runs.css", "data.css"))

ACCENT = gr.themes.Color(
    c50="#eef4ff", c100="#dbe7fe", c200="#bfd3fd", c300="#93b4fb", c400="#6490f6", c500="#3b6fe8",
    c600="#2457d6", c700="#1d47b0", c800="#1c3c8c", c900="#1a346f", c950="#122247", name="accent",
)  # fmt: skip
GREY = gr.themes.Color(
    c50="#f6f7f9", c100="#eceef2", c200="#dfe3e8", c300="#c7cdd6", c400="#98a2b0", c500="#667180",
    c600="#4b5563", c700="#353d49", c800="#1f252d", c900="#161b21", c950="#0e1216", name="grey",
)  # fmt: skip
SANS = ("-apple-system", "Segoe UI", "Roboto", "Noto Sans", "Liberation Sans", "system-ui", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Noto Sans Mono", "Liberation Mono", "monospace")

THEME = gr.themes.Base(
    primary_hue=ACCENT,
    secondary_hue=GREY,
    neutral_hue=GREY,
    radius_size=gr.themes.Size(xxs="2px", xs="4px", sm="6px", md="8px", lg="8px", xl="8px", xxl="8px"),
    text_size=gr.themes.Size(xxs="10px", xs="12px", sm="13px", md="14px", lg="16px", xl="20px", xxl="24px"),
    spacing_size=gr.themes.sizes.spacing_md,
    font=SANS,
    font_mono=MONO,
).set(
    body_background_fill="*neutral_50",
    body_background_fill_dark="*neutral_950",
    body_text_color="#1a2029",
    body_text_color_dark="#e6e9ee",
    body_text_color_subdued="#566170",
    body_text_color_subdued_dark="#a0aab8",
    background_fill_primary="#ffffff",
    background_fill_primary_dark="*neutral_900",
    background_fill_secondary="*neutral_50",
    background_fill_secondary_dark="#12161b",
    border_color_primary="*neutral_200",
    border_color_primary_dark="#2a313b",
    block_background_fill="#ffffff",
    block_background_fill_dark="*neutral_900",
    block_border_color="*neutral_200",
    block_border_color_dark="#2a313b",
    block_border_width="1px",
    block_shadow="none",
    block_label_background_fill="transparent",
    block_label_background_fill_dark="transparent",
    block_label_text_color="*body_text_color_subdued",
    block_label_text_color_dark="*body_text_color_subdued",
    block_title_text_weight="500",
    block_title_text_color="*body_text_color",
    block_title_text_color_dark="*body_text_color",
    block_info_text_color="*body_text_color_subdued",
    block_info_text_color_dark="*body_text_color_subdued",
    input_background_fill="#ffffff",
    input_background_fill_dark="#12161b",
    input_border_color="*neutral_300",
    input_border_color_dark="#3a434f",
    input_border_color_focus="*primary_500",
    input_border_color_focus_dark="*primary_400",
    input_placeholder_color="#6b7685",
    input_placeholder_color_dark="#8b96a5",
    input_shadow="none",
    input_shadow_focus="0 0 0 3px rgb(59 111 232 / 20%)",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_primary_background_fill_dark="*primary_600",
    button_primary_background_fill_hover_dark="*primary_500",
    button_primary_text_color="#ffffff",
    button_secondary_background_fill="#ffffff",
    button_secondary_background_fill_hover="*neutral_100",
    button_secondary_background_fill_dark="#1c222a",
    button_secondary_background_fill_hover_dark="#262e38",
    button_secondary_border_color="*neutral_300",
    button_secondary_border_color_dark="#3a434f",
    button_secondary_text_color="*body_text_color",
    button_secondary_text_color_dark="*body_text_color",
    button_border_width="1px",
    button_transition="background-color 0.12s ease",
    button_large_text_weight="500",
    button_small_text_weight="500",
    button_medium_text_weight="500",
    color_accent="*primary_600",
    color_accent_soft="*primary_50",
    color_accent_soft_dark="#1c2a47",
    slider_color="*primary_600",
    slider_color_dark="*primary_400",
    table_border_color="*neutral_200",
    table_border_color_dark="#2a313b",
    table_even_background_fill="#ffffff",
    table_even_background_fill_dark="*neutral_900",
    table_odd_background_fill="*neutral_50",
    table_odd_background_fill_dark="#12161b",
    layout_gap="16px",
)
