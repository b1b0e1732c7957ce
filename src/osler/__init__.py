"""osler finds out why a neural network does not train, and proves it."""

__version__ = "0.1.0"
