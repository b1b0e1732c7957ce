"""What every other part of osler speaks: signals, facts, traces, windows, rules, findings. Standard library and numpy only."""
