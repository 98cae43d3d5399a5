"""The Gradio dashboard."""
