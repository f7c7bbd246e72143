"""Files of one kind each: tensors by name, read and written without loading the rest."""
