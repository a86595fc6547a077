"""The engine in process, held to what ``generate()`` makes of the same prompts."""
