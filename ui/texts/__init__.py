"""Every word the user reads, one module per language."""
