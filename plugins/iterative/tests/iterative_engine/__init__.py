"""The engine in process, compared with the output of ``generate()`` for the same prompts."""
