"""What is promised to authors of plugins: listed in ``api.txt``, and changed only on purpose.

``python tests/unit/test_api.py > llmserve/api.txt`` writes the list anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from llmserve.api import API, MODULES

LISTED = Path(__file__).parents[2] / "llmserve" / "api.txt"


def promised() -> Iterator[str]:
    yield f"API {API}"
    for name in MODULES:
        module = import_module(name)
        for public in sorted(getattr(module, "__all__", None) or public_names(module)):
            yield f"{name}.{public}{signature(getattr(module, public))}"


def public_names(module: ModuleType) -> list[str]:
    """Return what a module imports under its own name, with its functions, else what it makes."""
    home = module.__name__
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", home) == home}
    given = re.findall(r"^ *from \S+ import (\w+) as \1$", inspect.getsource(module), re.M)
    if given:
        return given + [n for n, v in own.items() if inspect.isfunction(v) and n[0] != "_"]
    return [n for n in own if n[0].isupper()]


def signature(thing: object) -> str:
    ours = getattr(thing, "__module__", "").startswith("llmserve")
    if not ours or not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return ""
    try:
        made_with = str(inspect.signature(thing))
    except ValueError:
        # Made as the built-in type that it is derived from.
        return ""
    # Annotations are text, and shown as such; a function has another address in every process.
    made_with = re.sub(r"<function .+? at \w+>", "…", made_with)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", made_with)


def test_what_is_promised_is_what_is_there() -> None:
    listed = LISTED.read_text(encoding="utf-8").splitlines()
    assert listed == list(promised()), (
        "what goes or changes breaks plugins: raise API in llmserve/api.py as well, and say so in "
        "the changelog; then write the list anew, as the first lines of this file say"
    )


if __name__ == "__main__":
    print(*promised(), sep="\n")
