"""Real graphs of a tiny model, and a session on top of them, in one process."""
