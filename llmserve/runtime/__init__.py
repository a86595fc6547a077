"""What runs inside Triton's Python backend.

Everything here is loaded in the server's stub process: the standard library and
numpy, torch and transformers only where they are used, and nothing else of llmserve.
A request travels ``model`` → ``request`` → ``batch`` → a generator → ``generation``
→ a formatter → ``responder``.
"""
