"""Names that files, processes and environments share."""

from __future__ import annotations

MANIFEST = "llmserve.json"
"""The file in a model's folder that records what the model was built from and how to run it."""


def class_at(path: str) -> tuple[str, str]:
    """Return the module and the name of a ``package.module:Class``.

    Until 0.2, models named the modules in which our own classes were. They have moved since, and
    the package has all of them.

    >>> class_at("llmserve.runtime.batch:BatchDriver")
    ('llmserve.runtime', 'BatchDriver')
    """
    module, _, name = path.partition(":")
    ours = "llmserve.runtime"
    return (ours if module.startswith(f"{ours}.") else module), name


SCHEMA = 1
"""The version of that file's format; changes that older runtimes cannot read increment it."""

THREADS = "LLMSERVE_THREADS"
"""The environment variable with the number of threads of an engine that does not use OpenMP."""

STAND_IN_METRIC = "llmserve_stand_in"
"""A gauge of 1 in the server's metrics for each model whose requests a stand-in answers.

Its labels are ``model`` and ``instead_of``.
"""
