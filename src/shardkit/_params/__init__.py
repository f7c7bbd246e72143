"""A group's parameters: their storage, their views, who holds them, and their gradients."""
