"""Rules on randomness and resumed runs."""
