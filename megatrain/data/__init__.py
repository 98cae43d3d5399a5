"""Rows in, packed token batches out."""
