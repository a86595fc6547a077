"""The engine: decodes many generations at once, with the passes that a plugin's runner computes."""
