"""The plugin templates of ``llmserve plugin new``: real modules, checked like all others.

Each role has a folder with a plugin called *scaffold* and its tests; ``package`` has the files that
they share. A new package is a copy in which that word is replaced.
"""

from __future__ import annotations

from llmserve.scaffold.generate import KINDS, MODES, ROLES, new_package

__all__ = ["KINDS", "MODES", "ROLES", "new_package"]
