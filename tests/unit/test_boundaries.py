"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from llmserve.builder.causal import PLACEMENT_OPTIONS
from llmserve.builder.plan import REQUEST_OPTIONS, SOURCE_OPTIONS
from llmserve.registry import Registry
from llmserve.roles import Backend
from llmserve.runtime import contract

ROOT = Path(__file__).parents[2]
CORE = ROOT / "llmserve"
PLUGINS = sorted(
    folder
    for where in ("*/llmserve_*", "examples/*/llmserve_*")
    for folder in (ROOT / "plugins").glob(where)
)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def sources(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*.py"))
    return [path for path in paths if "tests" not in path.relative_to(ROOT).parts]


OUTSIDE = {
    "llguidance", "numpy", "torch", "transformers", "triton_python_backend_utils",
    *sys.stdlib_module_names,
}  # fmt: skip
SERVER = {
    "client", "errors", "names", "registry", "repository", "repository.check",
    "repository.dockerfile", "repository.manifest", "roles", "runtime.contract",
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "others", "outside"),
    [
        ("", None, None),
        ("runtime", set(), OUTSIDE),
        # Parsers of tool calls are plugins, and found as all of them are.
        ("client", {"errors", "registry", "roles", "tools"}, None),
        ("server", SERVER, None),
    ],
)
def test_who_may_import_whom(
    folder: str, others: set[str] | None, outside: set[str] | None
) -> None:
    """The core imports neither the command line nor plugins, and parts of it not all others."""
    forbidden = {"llmserve_cli", *(plugin.name for plugin in PLUGINS)}
    paths = sources(CORE / folder)
    assert paths
    for path in paths:
        for module in imports(path):
            top = module.split(".")[0]
            assert top not in forbidden, path
            if top == "llmserve" and others is not None:
                own = is_in(module, f"llmserve.{folder}")
                assert own or module.removeprefix("llmserve.") in others, path
            elif top != "llmserve" and outside is not None:
                assert top in outside, path


EMITTED = {"llmserve_ray.py"}
"""What a plugin never imports: it is copied to where all that it needs is installed."""


def test_plugins_do_not_import_one_another() -> None:
    assert PLUGINS
    for package in PLUGINS:
        others = {other.name for other in PLUGINS} - {package.name}
        for path in package.rglob("*.py"):
            if path.name in EMITTED:
                continue
            found = others & {module.split(".")[0] for module in imports(path)}
            assert not found, path


def loaded_by(code: str) -> set[str]:
    ask = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    return {name.split(".")[0] for name in run.stdout.split()}


HEAVY = {"torch", "transformers", "click", "tritonclient", "grpc", "numpy", "rich", "pytriton"}


@pytest.mark.parametrize(
    "code",
    [
        "import llmserve, llmserve.client, llmserve.server, llmserve.roles",
        "from llmserve.registry import Registry\nassert Registry.load().entries",
        "from llmserve.demo import demo_model_path\ndemo_model_path()",
    ],
)
def test_looking_around_loads_nothing_heavy(code: str) -> None:
    assert not loaded_by(code) & HEAVY


def module_of(path: Path, above: Path) -> str:
    parts = path.relative_to(above).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """Return which module of ours imports which, for types only and in functions included."""
    homes = ((CORE, ROOT), (ROOT / "cli", ROOT / "cli"))
    paths = {module_of(path, above): path for home, above in homes for path in sources(home)}
    graph = {}
    for module, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                # What is no module of its own comes from the one that is named.
                found |= inside & paths.keys() or {node.module}
        graph[module] = found & paths.keys() - {module}
    return graph


def reached_from(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [module]
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph()
    assert len(graph) > 60
    circular = sorted(m for m in graph if m in reached_from(m, graph))
    assert not circular, [f"{m} imports {sorted(graph[m] & {*circular})}" for m in circular]


def test_a_circle_through_a_type_would_be_found() -> None:
    graph = import_graph()
    assert "llmserve.builder.context" in graph["llmserve.roles"], "imported for its type alone"
    graph["llmserve.builder.context"].add("llmserve.roles")
    assert "llmserve.roles" in reached_from("llmserve.roles", graph)


def names_of_our_plugins() -> set[str]:
    """Return recipes, components and options of our plugins that are not the core's as well."""
    ours = {
        match[1]
        for path in (ROOT / "plugins").glob("*/pyproject.toml")
        if (match := re.search(r'(?m)^name = "(.+)"', path.read_text(encoding="utf-8")))
    }
    found: set[str] = set()
    known = {option.name for option in (*SOURCE_OPTIONS, *REQUEST_OPTIONS, *PLACEMENT_OPTIONS)}
    known |= {value.name for value in vars(contract).values() if isinstance(value, contract.Tensor)}
    known |= {tensor.name for tensor in (*contract.SAMPLING, *contract.TEXT_FORMAT_INPUTS)}
    for entry in Registry.load().entries:
        component = entry.component
        # The names of backends are Triton's, whoever brings one.
        if not isinstance(component, Backend):
            names = {component.name}
            # A word like "threads" is no name of an option in a sentence.
            options = getattr(component, "options", ())
            names |= {option.name for option in options if "_" in option.name}
            if entry.plugin.origin in ours:
                found |= names
            elif entry.plugin.origin == "llmserve":
                known |= names
    return found - known


def test_the_core_names_nothing_of_a_plugin() -> None:
    names = names_of_our_plugins()
    assert {"hf", "iterative", "stepwise", "trtllm", "cache_tokens"} <= names
    pattern = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, names))})(?![\w-])")
    # Triton's ModelConfig has a field of that name, and so has an option.
    allowed = {("llmserve.client.failures", "max_queue_size")}
    told = set()
    for path in sources(CORE):
        module = module_of(path, ROOT)
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose)
        told |= {(module, name) for text in texts for name in pattern.findall(str(text.value))}
    assert told <= allowed, sorted(told - allowed)
