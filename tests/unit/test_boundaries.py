"""Rules for the sources: which modules may import which, and what the core knows of plugins."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from llmserve.builder.adapters import ADAPTER_OPTIONS
from llmserve.builder.causal import PLACEMENT_OPTIONS
from llmserve.builder.guessing import GUESS_OPTIONS
from llmserve.builder.plan import REQUEST_OPTIONS, SOURCE_OPTIONS
from llmserve.builder.seeing import IMAGE_OPTIONS
from llmserve.builder.states import STATE_OPTIONS
from llmserve.contract import tensors
from llmserve.contract.options import OPTIONS
from llmserve.contract.tasks import TASKS
from llmserve.contract.tensors import Tensor
from llmserve.plugins.api import MODULES
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Backend
from tests.trees import nodes_of

ROOT = Path(__file__).parents[2]
CORE = ROOT / "llmserve"
API_FILE = CORE / "api.txt"
PLUGINS = sorted(
    folder
    for pattern in ("*/llmserve_*", "examples/*/llmserve_*")
    for folder in (ROOT / "plugins").glob(pattern)
)


def imports(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def sources(folder: Path) -> list[Path]:
    paths = sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")])
    return [path for path in paths if "tests" not in path.relative_to(ROOT).parts]


OUTSIDE = {
    "PIL", "llguidance", "numpy", "safetensors", "torch", "transformers",
    "triton_python_backend_utils",
    *sys.stdlib_module_names,
}  # fmt: skip
SERVER = {
    "client", "errors", "hardware", "lazy", "names", "packages", "plugins.registry",
    "plugins.roles", "problems", "repository", "repository.check", "repository.dockerfile",
    "repository.needs", "repository.repository",
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "others", "outside"),
    [
        ("", None, None),
        ("contract", set(), {*sys.stdlib_module_names}),
        ("runtime", {"hardware", "lazy"}, OUTSIDE),
        # Parsers of tool calls are plugins, and looked up like all plugins.
        ("client", {"errors", "lazy", "plugins.registry", "plugins.roles"}, None),
        ("server", SERVER, None),
    ],
)
def test_a_part_of_the_core_imports_only_what_it_may(
    folder: str, others: set[str] | None, outside: set[str] | None
) -> None:
    """The core imports neither the command line nor plugins; some parts may import even less.

    Each of them may import the contract.
    """
    forbidden = {"llmserve_cli", *(plugin.name for plugin in PLUGINS)}
    paths = sources(CORE / folder)
    assert paths
    for path in paths:
        for module in imports(path):
            top = module.split(".")[0]
            assert top not in forbidden, path
            if top == "llmserve" and others is not None:
                own = is_in(module, f"llmserve.{folder}") or is_in(module, "llmserve.contract")
                assert own or module.removeprefix("llmserve.") in others, path
            elif top != "llmserve" and outside is not None:
                assert top in outside, path


def test_a_manifest_is_read_with_its_repository() -> None:
    """What others take is a ``Repository`` or a ``Model``, which reads it once."""
    outside = [path for path in sources(CORE) if path.parent != CORE / "repository"]
    for path in (*outside, *sources(ROOT / "cli"), *sources(ROOT / "plugins")):
        for node in nodes_of(path):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "Manifest.read")


EMITTED = {"llmserve_ray.py"}
"""Files that no plugin imports: they are copied to where everything they need is installed."""


def test_plugins_do_not_import_one_another() -> None:
    assert PLUGINS
    for package in PLUGINS:
        others = {other.name for other in PLUGINS} - {package.name}
        for path in package.rglob("*.py"):
            if path.name in EMITTED:
                continue
            assert not others & {module.split(".")[0] for module in imports(path)}, path


def test_tests_of_a_plugin_need_nothing_of_this_repository() -> None:
    """They run in a copy of its folder; what others need too is in ``llmserve.testing``."""
    folder = ROOT / "plugins"
    paths = [path for path in folder.rglob("*.py") if "tests" in path.relative_to(folder).parts]
    assert len(paths) > 60
    for path in paths:
        assert "tests" not in {module.split(".")[0] for module in imports(path)}, path
    projects = [*(ROOT / "plugins").glob("*/pyproject.toml"), *(ROOT / "plugins").glob("*/*/py*ml")]
    assert len(projects) > 14
    for project in projects:
        assert "-p llmserve.testing" in project.read_text(encoding="utf-8"), project


@cache
def public_names() -> set[str]:
    names = {line.partition("(")[0] for line in API_FILE.read_text(encoding="utf-8").splitlines()}
    return {*names, *MODULES}


def private_imports(path: Path, own: str) -> Iterator[str]:
    """Return what a file imports of llmserve that is not public."""
    public = public_names()
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if is_in(name, "llmserve") and name not in public and not is_in(name, own):
                yield name


def test_plugins_import_only_what_is_public() -> None:
    """What a third party cannot have, ours do not use; the same goes for what we write for one."""
    folders = [*PLUGINS, *(package.parent / "bench" for package in PLUGINS), CORE / "scaffold"]
    paths = [path for folder in folders for path in sources(folder)]
    scaffolds = [path for path in paths if is_in(module_of(path, ROOT), "llmserve.scaffold")]
    assert len(scaffolds) > 10
    for path in paths:
        if path.name != "generate.py":
            assert not set(private_imports(path, "llmserve.scaffold")), path


NOT_PUBLIC = {
    "llmserve.client.exchange.Steps",
    "llmserve.graphs.packed_weight.Kind",
    "llmserve.graphs.packed_weight.product_weight",
    "llmserve.graphs.packed_weight.table_weight",
    "llmserve.graphs.rounding.rounded",
    "llmserve.graphs.rounding.whole_group",
    "llmserve.runtime.answer.reading.encode",
}
"""What our plugins' own tests take all the same: it becomes less, never more."""


def test_tests_of_plugins_import_what_is_public_or_for_tests() -> None:
    """What a third party's tests cannot have, ours have no need of either, but for a few names."""
    folder = ROOT / "plugins"
    paths = [path for path in folder.rglob("*.py") if "tests" in path.relative_to(folder).parts]
    taken = {name for path in paths for name in private_imports(path, "llmserve.testing")}
    assert taken == NOT_PUBLIC


def test_the_command_line_imports_only_what_is_public() -> None:
    taken = {
        name for path in sources(ROOT / "cli") for name in private_imports(path, "llmserve_cli")
    }
    assert not taken


def test_the_guide_imports_only_what_is_public(tmp_path: Path) -> None:
    guide = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"(?ms)^```python[^\n]*\n(.+?)^```$", guide)
    assert len(examples) > 10
    for example in examples:
        (path := tmp_path / "example.py").write_text(example, encoding="utf-8")
        assert not set(private_imports(path, "llmserve.scaffold")), example


def test_plugins_inherit_nothing_that_runs() -> None:
    """They hold our objects instead, so that a change inside one cannot break them."""
    allowed = ("llmserve.plugin.", "llmserve.testing.", "llmserve.errors.")
    for path in (path for package in PLUGINS for path in sources(package)):
        homes = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in nodes_of(path)
            if isinstance(node, ast.ImportFrom) and is_in(node.module or "", "llmserve")
            for alias in node.names
        }
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases = {homes.get(ast.unparse(base), "") for base in node.bases} - {""}
                assert all(base.startswith(allowed) for base in bases), f"{path}: {node.name}"


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return {name.split(".")[0] for name in run.stdout.split()}


HEAVY = {"torch", "transformers", "click", "tritonclient", "grpc", "numpy", "rich", "pytriton"}


@pytest.mark.parametrize(
    "code",
    [
        "import llmserve, llmserve.client, llmserve.server, llmserve.plugins.roles",
        "from llmserve.plugins.registry import Registry\nassert Registry.load().entries",
        "from llmserve.demo import demo_model_path\ndemo_model_path()",
    ],
)
def test_a_light_import_loads_nothing_heavy(code: str) -> None:
    assert not loaded_by(code) & HEAVY


def module_of(path: Path, above: Path) -> str:
    parts = path.relative_to(above).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """Return which of our modules imports which, including imports for types and in functions."""
    homes = ((CORE, ROOT), (ROOT / "cli", ROOT / "cli"))
    paths = [(module_of(path, above), path) for home, above in homes for path in sources(home)]
    graph: dict[str, set[str]] = {module: set() for module, _ in paths}
    for module, path in paths:
        imported = set()
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                # A name that is not a module belongs to the module it is imported from.
                imported |= submodules & graph.keys() or {node.module}
        graph[module] |= imported & graph.keys() - {module}
    return graph


def reached_from(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    pending = [module]
    while pending:
        new = graph[pending.pop()] - seen
        seen |= new
        pending += new
    return seen


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    assert len(graph) > 60
    circular = sorted(m for m in graph if m in reached_from(m, graph))
    assert not circular, [f"{m} imports {sorted(graph[m] & {*circular})}" for m in circular]


def test_a_cycle_through_a_type_would_be_detected() -> None:
    graph = import_graph()
    assert "llmserve.builder.context" in graph["llmserve.plugins.roles"], "imported for types only"
    graph["llmserve.builder.context"].add("llmserve.plugins.roles")
    assert "llmserve.plugins.roles" in reached_from("llmserve.plugins.roles", graph)


def names_of_our_plugins() -> set[str]:
    """Return recipes, components and options of our plugins whose names the core does not use."""
    ours = {
        match[1]
        for path in (ROOT / "plugins").glob("*/pyproject.toml")
        if (match := re.search(r'(?m)^name = "(.+)"', path.read_text(encoding="utf-8")))
    }
    plugin_names: set[str] = set()
    core_names = {
        option.name
        for option in (
            *SOURCE_OPTIONS,
            *REQUEST_OPTIONS,
            *PLACEMENT_OPTIONS,
            *GUESS_OPTIONS,
            *ADAPTER_OPTIONS,
            *STATE_OPTIONS,
            *IMAGE_OPTIONS,
        )
    }
    core_names |= {value.name for value in vars(tensors).values() if isinstance(value, Tensor)}
    core_names |= {name for row in OPTIONS.values() for name in (row.name, *row.aliases)}
    # A recipe may have the name of what its models are for.
    core_names |= TASKS.keys()
    for entry in Registry.load().entries:
        component = entry.component
        # Backend names are Triton's, whichever package provides the backend.
        if not isinstance(component, Backend):
            names = {component.name}
            # In a sentence, a word like "threads" does not name an option.
            options = getattr(component, "options", ())
            names |= {option.name for option in options if "_" in option.name}
            if entry.plugin.origin in ours:
                plugin_names |= names
            elif entry.plugin.origin == "llmserve":
                core_names |= names
    return plugin_names - core_names


def test_the_core_names_nothing_of_a_plugin() -> None:
    names = names_of_our_plugins()
    assert {"hf", "iterative", "stepwise", "trtllm", "cache_tokens"} <= names
    pattern = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, names))})(?![\w-])")
    # Triton's ModelConfig has a field of that name, and so has an option.
    # So has generate() of transformers, which models that others wrote call.
    allowed = {
        ("llmserve.client.failures", "max_queue_size"),
        ("llmserve.repository.handwritten", "max_length"),
    }
    mentions = set()
    for path in sources(CORE):
        module = module_of(path, ROOT)
        nodes = list(nodes_of(path))
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose)
        mentions |= {(module, name) for text in texts for name in pattern.findall(str(text.value))}
    assert mentions <= allowed, sorted(mentions - allowed)


def test_tests_that_use_the_shared_ones_can_be_run_alone() -> None:
    """Pytest takes the nearest settings; with a plugin's own, it finds only that plugin's tests."""
    for folder in PLUGINS:
        tests = (folder.parent / "tests").rglob("*.py")
        if any(is_in(module, "tests") for path in tests for module in imports(path)):
            settings = (folder.parent / "pyproject.toml").read_text(encoding="utf-8")
            assert "[tool.pytest" not in settings, folder.parent
