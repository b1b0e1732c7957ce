"""Evaluation: figures that do not mean what they seem to."""
