"""What a row of the modules ``workarounds`` says, in which a package lists its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workaround:
    """What is done here because of someone else's fault."""

    fault: str
    seen_in: str
    done_by: tuple[str, ...]
    """``module:name`` of what makes up for it, in the package that has the row."""
    can_go: str
    """How one would notice that it is needed no more."""
