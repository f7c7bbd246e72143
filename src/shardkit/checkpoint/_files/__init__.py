"""Formats of files: tensors by name, read and written without loading the rest."""
