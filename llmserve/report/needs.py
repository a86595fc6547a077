"""What reports need beside llmserve itself."""

from __future__ import annotations

from importlib.util import find_spec

from llmserve.errors import ConfigError

PACKAGES = ("jinja2", "matplotlib")


def require() -> None:
    """Refuse to go on without what draws and writes reports: before anything is measured.

    >>> require()
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reports need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed",
            mend="pip install 'llmserve[report]'",
        )
