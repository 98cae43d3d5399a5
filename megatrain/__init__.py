"""MegaTrain: full-parameter training of language models that do not fit in VRAM."""
