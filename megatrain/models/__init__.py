"""HF model -> blocks: inspection, templates, attention, loss, weights in and out."""
