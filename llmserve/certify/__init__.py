"""Whether what a server answers is what the model says.

A :class:`Check` is one promise of a server. It runs in an :class:`Examination` of an endpoint: a
model of a Triton, or a server with OpenAI's API; if the model is at hand, its answers are compared
with those. ``llmserve certify`` runs all checks, and the tests of recipes run those that they
share with it. A plugin adds checks with the hook ``llmserve_register_checks``::

    from llmserve.certify import Broken, Check, Examination

    def greets(exam: Examination) -> None:
        ask = exam.greedy("Hello", 8)
        if not exam.ask(ask).text:
            raise Broken("it does not greet", expected="words", got="", ask=ask)
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
