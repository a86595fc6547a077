"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "llmserve"
PLUGINS = sorted(
    folder
    for where in ("*/llmserve_*", "examples/*/llmserve_*")
    for folder in (ROOT / "plugins").glob(where)
)
OURS = [*CORE.rglob("*.py"), *(ROOT / "cli").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def sources(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "tests" not in path.parts]


@pytest.mark.parametrize("path", sources(CORE), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_neither_cli_nor_plugins(path: Path) -> None:
    plugins = {folder.name for folder in PLUGINS}
    for module in imports(path):
        assert module.split(".")[0] not in {"llmserve_cli", *plugins}


@pytest.mark.parametrize("path", sources(CORE / "runtime"), ids=lambda path: path.name)
def test_the_runtime_imports_nothing_else_of_llmserve(path: Path) -> None:
    for module in imports(path):
        assert not is_in(module, "llmserve") or is_in(module, "llmserve.runtime")
        assert module.split(".")[0] in {
            "llmserve", "numpy", "torch", "transformers", "triton_python_backend_utils",
            *sys.stdlib_module_names,
        }  # fmt: skip


@pytest.mark.parametrize("path", sources(CORE / "client"), ids=lambda path: path.name)
def test_the_client_imports_only_itself_and_the_errors(path: Path) -> None:
    for module in imports(path):
        if is_in(module, "llmserve"):
            assert is_in(module, "llmserve.client") or module == "llmserve.errors"


BACKENDS = sources(CORE / "server" / "backends")


@pytest.mark.parametrize("path", BACKENDS, ids=lambda path: str(path.relative_to(CORE)))
def test_stand_ins_are_made_of_the_runtime(path: Path) -> None:
    """They run inside Triton; what plugins offer they find through the registry."""
    for module in imports(path):
        if is_in(module, "llmserve"):
            ours = is_in(module, "llmserve.server.backends") or is_in(module, "llmserve.runtime")
            assert ours or module in {"llmserve.errors", "llmserve.registry", "llmserve.demo"}


@pytest.mark.parametrize(
    "path", sorted({*sources(CORE / "server")} - {*BACKENDS}), ids=lambda path: path.name
)
def test_the_server_imports_only_itself_and_the_errors(path: Path) -> None:
    for module in imports(path):
        if is_in(module, "llmserve"):
            assert is_in(module, "llmserve.server") or module in {
                "llmserve.errors", "llmserve.container",
            }  # fmt: skip


def test_plugins_do_not_import_one_another() -> None:
    assert PLUGINS
    for package in PLUGINS:
        others = {other.name for other in PLUGINS} - {package.name}
        for path in package.rglob("*.py"):
            assert not others & {module.split(".")[0] for module in imports(path)}, path


def loaded_by(code: str) -> set[str]:
    ask = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    return {name.split(".")[0] for name in run.stdout.split()}


def test_importing_llmserve_loads_nothing_heavy() -> None:
    loaded = loaded_by("import llmserve, llmserve.client, llmserve.server, llmserve.roles")
    assert not loaded & {"torch", "transformers", "click", "tritonclient", "grpc", "numpy", "rich"}


def test_listing_plugins_loads_nothing_heavy() -> None:
    loaded = loaded_by("from llmserve.registry import Registry\nassert Registry.load().entries")
    assert not loaded & {"torch", "transformers", "click", "tritonclient", "grpc", "numpy", "rich"}


def test_every_file_is_small() -> None:
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in OURS)
    assert lengths[-1] <= 300
    assert lengths[len(lengths) // 2] <= 90
