"""What runs inside Triton beside the engine: it reads requests, asks, and writes answers."""
