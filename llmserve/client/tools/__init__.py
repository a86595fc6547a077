"""Tool calls: from a request's tools to the calls in its answer, for the client and for frontends.

``request`` checks the tools, ``formats`` chooses by the chat template how the model is shown them
(``prompt``: in a message) and which of the ``parsers`` reads its answer; ``calls`` assembles what
that returns (``parts``).
"""
