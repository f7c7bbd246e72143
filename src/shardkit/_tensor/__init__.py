"""The sharded tensor: a piece, the description of the whole, and the operators on pieces."""
