"""The sharded tensor: a piece, what it is a piece of, and the operators that work on pieces."""
