"""A plugin's faults are told at build time, with the plugin, the role and the component."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import llmserve
from llmserve.builder.build import BuildSpec, build_spec
from llmserve.builder.context import BuildContext
from llmserve.demo import demo_model_path
from llmserve.errors import ModelSourceError, PluginError
from llmserve.registry import Entry, Plugin, Registry
from llmserve.repository.check import check_repository
from llmserve.roles import Batching, Formatter, Generator, Recipe, Tokenizer
from llmserve.runtime import contract

TEXT = "llmserve.runtime.text_formatter:TextFormatter"
OUTPUTS = (contract.TEXT_OUTPUT, contract.FINISH_REASON, *contract.USAGE)


def formatter(**changes: Any) -> Formatter:
    whole = {"runtime": TEXT, "inputs": contract.TEXT_FORMAT_INPUTS, "outputs": OUTPUTS, **changes}
    return Formatter(name="other", summary="", **whole)


def build(
    repository: Path, *components: Any, report: Callable[[str], None] = print, **spec: Any
) -> None:
    """Build with components of a plugin that is called acme."""
    plugin = Plugin("acme", "hypothesis", version("hypothesis"), module=ModuleType("acme"))
    registry = Registry.load()
    for component in components:
        role = type(component).__name__.lower()
        registry.entries.append(Entry(component, role, plugin))
        if role not in ("recipe", "generator"):
            spec.setdefault(role, component.name)
    asked = {"plugin": "hf", "model": "demo", "output": repository, **spec}
    build_spec(BuildSpec(**asked), registry=registry, report=report)


WHOSE = r"formatter 'other' of plugin 'acme' \(hypothesis [\d.]+\)"


CLASSES = """
class Sound:
    def __init__(self, settings, folder): ...
    def format(self, answers): ...
class Formless:
    def __init__(self, settings, folder): ...
class Bare:
    def format(self, answers): ...
def make(settings, folder): ...
NUMBER = 7
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return tmp_path / "code"


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Sound", "import triton_python_backend_utils as u\nu.Tensor", None),
        ("make", "", None),
        ("Lost", "", "acme_code has no Lost"),
        ("NUMBER", "", "is no class"),
        ("Formless", "", "acme_code:Formless has no method format"),
        ("Bare", "", r"cannot be made with \(settings, folder\)"),
        ("Sound", "print('hello')\n1 / 0", "importing acme_code fails: ZeroDivisionError"),
        ("Sound", "import acme_code.lost", "importing acme_code fails: ModuleNotFoundError"),
        ("Sound", "import os\nos._exit(9)", "importing acme_code ended the process .* code 9"),
    ],
)
def test_a_class_that_cannot_be_run_is_refused_and_found_by_check(
    tmp_path: Path, acme: Path, name: str, code: str, message: str | None
) -> None:
    (acme / "acme_code.py").write_text(CLASSES)
    repository = tmp_path / "r"
    # What is sound when it is built may be broken by an upgrade.
    build(repository, formatter(runtime="acme_code:Sound"))
    manifest = repository / "demo" / "llmserve.json"
    manifest.write_text(manifest.read_text().replace("acme_code:Sound", f"acme_code:{name}"))
    (acme / "acme_code.py").write_text(f"{code}\n{CLASSES}")
    from llmserve.repository import runtimes

    runtimes._SOUND.clear()
    told = [str(problem) for problem in check_repository(repository) if problem.fatal]
    if message is None:
        build(tmp_path / "other", formatter(runtime=f"acme_code:{name}"))
        assert not told
        return
    with pytest.raises(PluginError, match=f"^{WHOSE} cannot be run: .*{message}"):
        build(tmp_path / "other", formatter(runtime=f"acme_code:{name}"))
    assert not (tmp_path / "other").exists()
    (line,) = told
    assert line.startswith("demo: its formatter 'other' cannot be run: ")


def test_a_class_whose_packages_are_elsewhere_is_told_and_built(tmp_path: Path, acme: Path) -> None:
    (acme / "acme_code.py").write_text(f"import not_installed_here\n{CLASSES}")
    told: list[str] = []
    build(tmp_path / "r", formatter(runtime="acme_code:Sound"), report=told.append)
    (line,) = [line for line in told if "acme_code" in line]
    assert "No module named 'not_installed_here'" in line
    notes = [str(p) for p in check_repository(tmp_path / "r") if not p.fatal]
    assert any("not_installed_here" in note for note in notes)


@pytest.mark.parametrize("mode", ["batch", "step"])
def test_a_generator_has_the_methods_of_its_modes(tmp_path: Path, acme: Path, mode: str) -> None:
    (acme / "acme_code.py").write_text(
        "class Engine:\n    def __init__(self, settings, folder): ...\n"
    )
    engine = Generator(name="e", summary="", runtime="acme_code:Engine", modes=frozenset({mode}))
    driver = Batching(name="d", summary="", runtime="llmserve.runtime.batch:BatchDriver", mode=mode)
    missing = {"batch": "generate", "step": "stepper"}[mode]
    with pytest.raises(PluginError, match=f"generator 'e' of plugin .* has no method {missing}"):
        build(tmp_path / "r", engine, driver, generator="e")


LINES = """
class Lines:
    eos_ids = frozenset()
    context_length = None
    def __init__(self, settings, folder): ...
    def generate(self, generations, tokenizer): ...
    def encode(self, text, *, special=True): return list(text.encode())
    def decode(self, ids): return bytes(ids).decode()
"""


@pytest.mark.parametrize("source", ["folder", "huggingface", None])
def test_what_a_model_folder_holds_is_the_generators_to_say(
    tmp_path: Path, acme: Path, source: Any
) -> None:
    (acme / "acme_code.py").write_text(LINES)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "verse.txt").write_text("a line\n")

    def prepare(context: BuildContext) -> Mapping[str, Any]:
        return context.place(sorted(context.source.path.glob("*.txt")), "model")

    lines = Generator(
        name="lines", summary="", runtime="acme_code:Lines", source=source, weights=("*.txt",),
        prepare=prepare,
    )  # fmt: skip
    letters = Tokenizer(name="letters", summary="", runtime="acme_code:Lines")
    recipe = Recipe(
        name="verses", summary="", tokenizer="letters", generator="lines", batching="dynamic",
        formatter="text",
    )  # fmt: skip

    def built(model: str) -> dict[str, Any]:
        repository = tmp_path / "r"
        build(
            repository, recipe, lines, letters,
            plugin="verses", model=model, name="m", force=True, tokenizer=None,
        )  # fmt: skip
        assert not [p for p in check_repository(repository) if p.fatal]
        from llmserve.repository.manifest import Manifest

        manifest = Manifest.read(repository / "m")
        assert manifest is not None
        return dict(manifest.source)

    if source == "huggingface":
        with pytest.raises(ModelSourceError, match=r"has no config\.json"):
            built(str(corpus))
        return
    assert built(str(corpus)) == {"kind": "local", "folder": "corpus"}
    assert (tmp_path / "r" / "m" / "1" / "model" / "verse.txt").is_file()
    if source is None:
        assert built("anything") == {"kind": "name", "name": "anything"}
        return
    with pytest.raises(ModelSourceError, match=r"some/where: .* takes a local folder$"):
        built("some/where")
    (corpus / "verse.txt").unlink()
    with pytest.raises(ModelSourceError, match=r"no weights: no \*\.txt in corpus"):
        built(str(corpus))


def test_another_generator_can_be_chosen(tmp_path: Path) -> None:
    """What the recipe says of the one that it replaces is left out."""
    spec = BuildSpec("iterative", "demo", output=tmp_path, generator="transformers")
    with pytest.raises(Exception, match="cannot be driven by batching 'iterative'"):
        build_spec(spec)
    result = llmserve.build(
        "iterative", "demo", output=tmp_path, generator="transformers", batching="dynamic"
    )
    assert result.manifest.components["generator"]["name"] == "transformers"


def test_links_are_followed_within_the_model_and_into_the_hubs_cache_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("not yours")
    model = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    (model / "vocab.txt").symlink_to(secret)
    with pytest.raises(ModelSourceError, match=r"vocab\.txt is a link to .*secret\.txt, outside"):
        llmserve.build("hf", str(model), output=tmp_path / "r")
    assert not (tmp_path / "r").exists()
    (model / "vocab.txt").unlink()
    (model / "model.safetensors").rename(model / "real")
    (model / "model.safetensors").symlink_to("real")
    llmserve.build("hf", str(model), output=tmp_path / "r")
