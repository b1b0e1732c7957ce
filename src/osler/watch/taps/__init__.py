"""One observed thing a file; each has ``install(...)`` and nothing that judges."""
