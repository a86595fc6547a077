"""What plugins may rely on: which modules are public, and the number of this state of them.

``API`` is raised when something that was public goes or changes, so that a plugin made for
another number is refused in one line instead of failing somewhere inside. What is only added
does not raise it. A plugin says what it is made for by the group of its entry point, which is
read before anything of it is imported::

    [project.entry-points."llmserve.api2"]
    acme = "acme_llmserve"

In the group ``llmserve`` a plugin says nothing, and counts as made for the current number.

``api.txt`` beside this file has every public name, a line each.
"""

from __future__ import annotations

API = 2
"""The number of the API that this llmserve has."""

MODULES = ("llmserve", "llmserve.plugin", "llmserve.runtime", "llmserve.runtime.contract")
"""The public modules. In these, every name in ``__all__`` is."""
