"""One module per page, each with one build()."""
