"""The state to save and load: models and optimizers by names, and the sources of values."""
