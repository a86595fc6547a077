"""Everything that plugins may rely on, read from the sources: what ``api.txt`` holds.

``python -m llmserve.apilisting`` prints it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from llmserve.api import API, MODULES


def listing() -> list[str]:
    """Return every public name with its signature or value.

    Read from the sources, so that nothing is imported and no machine gives another answer.

    >>> listing()[0], "llmserve.options.INT32_MAX = 2 ** 31 - 1" in listing()
    ('API 1', True)
    """
    lines = [f"API {API}"]
    for module in MODULES:
        for name in public_names(module):
            lines += _described(f"{module}.{name}", _definition(module, name))
    return lines


def public_names(module: str) -> list[str]:
    """Return what a module offers: what its ``__all__`` says, else what it defines.

    >>> public_names("llmserve.options")
    ['INT32_MAX', 'Option', 'Value', 'parse_assignments', 'resolve']
    """
    tree = _parsed(module)
    defined = _defined(tree)
    said = defined.get("__all__")
    names = ast.literal_eval(said.value) if isinstance(said, ast.Assign) else defined
    return sorted(name for name in names if not name.startswith("_"))


def _parsed(module: str) -> ast.Module:
    root = Path(__file__).parent.parent.joinpath(*module.split("."))
    path = root / "__init__.py" if root.is_dir() else root.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined(tree: ast.Module) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _definition(module: str, name: str) -> ast.stmt:
    """Find a definition, in another module if this one has it from there."""
    tree = _parsed(module)
    if node := _defined(tree).get(name):
        return node
    for found in ast.walk(tree):
        if isinstance(found, ast.ImportFrom) and found.module:
            for alias in found.names:
                if (alias.asname or alias.name) == name:
                    return _definition(found.module, alias.name)
    raise LookupError(f"{module} offers {name} and has it from nowhere")


def _described(name: str, node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield f"class {name}({', '.join(map(ast.unparse, node.bases))})"
        for member in node.body:
            for line in _member(member):
                yield f"{name}.{line}"
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield f"{name}{_signature(node)}"
    elif isinstance(node, ast.Assign):
        yield f"{name} = {ast.unparse(_Short().visit(node.value))}"
    elif isinstance(node, ast.AnnAssign):
        # Values of a table are its business; that it is there and of which type is public.
        yield f"{name}: {ast.unparse(node.annotation)}"


def _member(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if node.name == "__init__":
            yield f"__init__{_signature(node)}"
            yield from _attributes(node)
        elif not node.name.startswith(("_", "test_")):
            kinds = [f" @{ast.unparse(kind)}" for kind in node.decorator_list]
            yield f"{node.name}{_signature(node)}{''.join(kinds)}"
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        if not node.target.id.startswith("_"):
            yield ast.unparse(node)
    elif isinstance(node, ast.Assign):
        yield ast.unparse(node)


def _attributes(init: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(init):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and not node.attr.startswith("_")
        ):
            yield f"{node.attr} (attribute)"


class _Short(ast.NodeTransformer):
    """Leaves out what a help text says, which anybody may reword."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        is_prose = isinstance(node.value, str) and " " in node.value
        return ast.Constant("…") if is_prose else node


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returned}"


if __name__ == "__main__":
    print(*listing(), sep="\n")  # noqa: T201
