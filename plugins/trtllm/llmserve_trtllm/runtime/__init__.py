"""Code that runs inside Triton next to the engine: reads requests, calls it, writes answers."""
