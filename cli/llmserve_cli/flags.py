"""Options of a plugin's own as flags: ``--engine DIR`` is ``--set engine=DIR``."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.errors import OptionError, UsageError

OWN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""What a command is told so that flags it does not know get to :func:`read_flags`."""


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """Read what is left of a command line; which options there are, the build says.

    >>> read_flags(["--engine", "./engine", "--build-engine", "--layout=engine"])
    {'engine': './engine', 'build_engine': 'true', 'layout': 'engine'}
    """
    found: dict[str, str] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not flag:
            raise UsageError(f"{word!r} belongs to no option", mend="see llmserve build --help")
        name = flag.replace("-", "_")
        if not equals:
            # A flag alone means that it is so.
            alone = not waiting or waiting[0].startswith("--")
            value = "true" if alone else waiting.pop(0)
        if name in found:
            raise OptionError(f"--{flag} is given twice")
        found[name] = value
    return found
