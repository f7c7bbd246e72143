"""What is saved and loaded: models and optimizers by names, parts, and where values come from."""
