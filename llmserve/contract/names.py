"""Names that files, processes and environments share."""

from __future__ import annotations

MANIFEST = "llmserve.json"
"""The file in a model's folder that records what the model was built from and how to run it."""


KNOWN_ANSWERS = "known-answers.json"
"""The file beside it with what the model answered when it was first well (``serve --certify``)."""

SCHEMA = 1
"""The version of that file's format; changes that older runtimes cannot read increment it."""

THREADS = "LLMSERVE_THREADS"
"""The environment variable with the number of threads of an engine that does not use OpenMP."""

RENEWED = ".renewed"
"""The file in a version's folder, as it is served, by which a reload looks new to Triton. It is
none of the model's."""
WARM = "LLMSERVE_WARM"
"""The environment variable with the folder in which engines keep full pages of their caches."""
WARM_BYTES = "LLMSERVE_WARM_BYTES"
"""The environment variable with how many bytes these pages may take in all."""

STAND_IN_METRIC = "llmserve_stand_in"
"""A gauge of 1 in the server's metrics for each model whose requests a stand-in answers.

Its labels are ``model`` and ``instead_of``.
"""

_RUNTIME = "llmserve.runtime"


def public_runtime(runtime: str) -> str:
    """Return where a class that a model names is public: our modules may move, and models stay.

    >>> public_runtime("llmserve.runtime.text_formatter:TextFormatter")
    'llmserve.runtime:TextFormatter'
    >>> public_runtime("llmserve_acme.engine:Engine")
    'llmserve_acme.engine:Engine'
    """
    module, colon, name = runtime.partition(":")
    return f"{_RUNTIME}{colon}{name}" if module.startswith(f"{_RUNTIME}.") else runtime
