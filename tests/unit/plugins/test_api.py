"""The API promised to plugin authors: it is listed in ``api.txt`` and changes only on purpose.

``python tests/unit/plugins/test_api.py > llmserve/api.txt`` regenerates the list.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from llmserve.plugins.api import API, MODULES

API_FILE = Path(__file__).parents[3] / "llmserve" / "api.txt"


def public_api() -> Iterator[str]:
    yield f"API {API}"
    for name in MODULES:
        module = import_module(name)
        for public in sorted(getattr(module, "__all__", None) or public_names(module)):
            yield f"{name}.{public}{signature(getattr(module, public))}"


def public_names(module: ModuleType) -> list[str]:
    """Return the capitalized names and the functions that a module defines."""
    home = module.__name__
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", home) == home}
    return [n for n, v in own.items() if n[0].isupper() or (inspect.isfunction(v) and n[0] != "_")]


def signature(member: object) -> str:
    ours = getattr(member, "__module__", "").startswith("llmserve")
    if not ours or not (inspect.isclass(member) or inspect.isfunction(member)):
        return ""
    try:
        text = str(inspect.signature(member))
    except ValueError:
        # It is constructed like the built-in type that it derives from.
        return ""
    # Annotations are strings and appear quoted; a function's address differs in every process.
    text = re.sub(r"<function .+? at \w+>", "…", text)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def test_the_public_api_is_the_listed_one() -> None:
    listed = API_FILE.read_text(encoding="utf-8").splitlines()
    assert listed == list(public_api()), (
        "a removal or change breaks plugins: raise API in llmserve/plugins/api.py, add it to the "
        "changelog; then regenerate the list with the command at the top of this file"
    )


if __name__ == "__main__":
    print(*public_api(), sep="\n")
