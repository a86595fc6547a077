"""A parameter of the engine backend and the option that sets it."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.options import Option
from llmserve_trtllm.versions import Version


@dataclass(frozen=True)
class Parameter:
    """An option and the versions in whose ``config.pbtxt`` it has a place.

    ``since`` and ``until`` are those of the version table, which has no releases between 0.5.0
    and 0.12; ``always`` writes the default too, where a version's own may be another.
    """

    option: Option
    since: str = "0.12"
    until: str = "999.0"
    always: bool = False
    instead: str = ""

    @property
    def key(self) -> str:
        """Its name in ``config.pbtxt``."""
        return self.option.name

    @property
    def when(self) -> str:
        """Say which versions have it."""
        if self.until != "999.0":
            return f"only those before {self.until} have it"
        return f"it is there from {self.since} on"

    def exists_in(self, version: Version) -> bool:
        """Whether a version reads it."""
        return Version.parse(self.since) <= version < Version.parse(self.until)


def switch(name: str, default: bool, text: str, **more: str) -> Parameter:
    """Return a parameter that is true or false."""
    return Parameter(Option(name, default, text), **more)  # type: ignore[arg-type]


def count(name: str, default: int, text: str, *, low: int = 0, **more: str) -> Parameter:
    """Return a parameter that is a whole number."""
    option = Option(name, default, text, minimum=low, maximum=2**63 - 1)
    return Parameter(option, **more)  # type: ignore[arg-type]


def share(name: str, default: float, text: str, **more: str) -> Parameter:
    """Return a parameter between 0 and 1."""
    option = Option(name, default, text, minimum=0, maximum=1)
    return Parameter(option, **more)  # type: ignore[arg-type]


def words(name: str, text: str, choices: tuple[str, ...] = (), **more: str) -> Parameter:
    """Return a parameter that is text, empty by default."""
    option = Option(name, "", text, choices=("", *choices) if choices else ())
    return Parameter(option, **more)  # type: ignore[arg-type]
