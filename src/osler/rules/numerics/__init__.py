"""Numerics: non-finite values, the operation that made them and its operand."""
