"""Stand-ins: backends written in Python under the names of those that the wheel does not bring.

They run inside Triton, as :mod:`llmserve.runtime` does, and are made of its parts.
"""
