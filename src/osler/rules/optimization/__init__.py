"""Optimization: rates that are off by orders of magnitude, and what a loss curve shows of it."""
