"""State dicts of modules with sharded parameters, and whole tensors of them."""
