"""Errors in a plugin's code are reported at build time, with the name of the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmserve.builder import build as builder
from llmserve.builder.build import build_spec
from llmserve.builder.plan import BuildResult, BuildSpec
from llmserve.errors import ModelSourceError, PluginError
from llmserve.plugin import (
    Assembly,
    Batching,
    BuildContext,
    Formatter,
    Generator,
    Recipe,
    Tokenizer,
)
from llmserve.plugins.registry import Entry, Plugin, Registry
from llmserve.repository import runtimes
from llmserve.repository.check import check_repository
from llmserve.repository.repository import Repository
from llmserve.repository.runtimes import problem_with
from llmserve.testing.command import run
from tests.support import install, replace_text

TEXT = "llmserve.runtime:TextFormatter"
ACME = r"of plugin 'acme' \(hypothesis [\d.]+\)"
LINES = """
class Lines:
    eos_ids = frozenset()
    context_length = None
    def __init__(self, settings, folder): ...
    def generate(self, generations, tokenizer): ...
    def encode(self, text, *, special=True): return list(text.encode())
    def decode(self, ids): return bytes(ids).decode()
"""
CODE = """
class Valid:
    def __init__(self, settings, folder): ...
    def format(self, answers): ...
class NoFormat:
    def __init__(self, settings, folder): ...
class NoInit:
    def format(self, answers): ...
def make(settings, folder): ...
NUMBER = 7
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a plugin's modules importable, here and in the process that inspects its classes."""
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    (tmp_path / "code" / "acme_lines.py").write_text(LINES)
    (tmp_path / "code" / "acme_code.py").write_text(CODE)
    runtimes._VALID.clear()
    return tmp_path / "code" / "acme_code.py"


def build(
    repository: Path, *components: Any, report: Callable[[str], None] = print, **options: Any
) -> BuildResult:
    """Build with a plugin named acme, whose default components load nothing heavy."""
    plugin = Plugin("acme", "hypothesis", version("hypothesis"), module=ModuleType("acme"))
    lines = Generator(name="lines", summary="", runtime="acme_lines:Lines", source=None)
    letters = Tokenizer(name="letters", summary="", runtime="acme_lines:Lines")
    recipe = Recipe(name="verses", summary="", tokenizer="letters", generator="lines")
    registry = Registry.load()
    chosen = {(type(part), part.name): part for part in (lines, letters, recipe, *components)}
    for part in chosen.values():
        registry.entries.append(Entry(part, type(part).__name__.lower(), plugin))
    options |= {type(part).__name__.lower(): part.name for part in components}
    spec = BuildSpec(**{"plugin": "verses", "model": "any", "output": repository, **options})
    return build_spec(spec, registry=registry, report=report)


def formatter(runtime: str = TEXT, **changes: Any) -> Formatter:
    return Formatter(name="other", summary="", runtime=runtime, **changes)


def test_the_package_of_every_chosen_component_is_recorded(tmp_path: Path) -> None:
    result = build(tmp_path / "r", formatter(requires=("Tritonclient",)))
    assert result.manifest.packages["hypothesis"] == version("hypothesis")
    text = (tmp_path / "r" / "Dockerfile").read_text()
    for package in ("hypothesis", "tritonclient"):
        assert f"{package}=={version(package)}" in text


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("Valid", "import triton_python_backend_utils as u\nu.Tensor", None),
        ("make", "", None),
        ("Missing", "", "acme_code has no Missing"),
        ("NUMBER", "", "is not a class"),
        ("NoFormat", "", "acme_code:NoFormat has no method format"),
        ("NoInit", "", r"cannot be constructed with \(settings, folder\)"),
        ("Valid", "print('hello')\n1 / 0", "importing acme_code fails: ZeroDivisionError"),
        ("Valid", "import acme_code.missing", "importing acme_code fails: ModuleNotFoundError"),
        ("Valid", "import os\nos._exit(9)", "importing acme_code ended the process .* code 9"),
    ],
)
def test_a_class_that_cannot_be_run_is_refused_and_found_by_check(
    tmp_path: Path, code: Path, name: str, header: str, message: str | None
) -> None:
    repository = tmp_path / "r"
    # An upgrade may break what was valid at build time.
    build(repository, formatter("acme_code:Valid"))
    replace_text(repository / "any" / "llmserve.json", "acme_code:Valid", f"acme_code:{name}")
    code.write_text(f"{header}\n{CODE}", "utf-8")
    runtimes._VALID.clear()
    problems = [str(problem) for problem in check_repository(repository) if problem.fatal]
    if message is None:
        build(tmp_path / "other", formatter(f"acme_code:{name}"))
        assert not problems
        return
    assert [line[:42] for line in problems] == ["any: its formatter 'other' cannot be run: "]
    with pytest.raises(PluginError, match=f"^formatter 'other' {ACME} cannot be run: .*{message}"):
        build(tmp_path / "other", formatter(f"acme_code:{name}"))
    assert not (tmp_path / "other").exists()


def test_an_environment_that_cannot_load_a_model_is_found_before_it_is_served(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "import acme_code.missing"
    code.write_text(CODE.replace("class NoFormat", f"""
    @staticmethod
    def try_imports(settings, folder):
        assert settings == {{}} and folder.name == "1", (settings, folder)
        {broken}
class NoFormat"""), "utf-8")  # fmt: skip
    # Where nothing conflicts, a build does not take the seconds that the imports take.
    monkeypatch.setattr(builder, "conflicts", list)
    build(tmp_path / "r", formatter("acme_code:Valid"))
    (problem,) = check_repository(tmp_path / "r")
    cause = "the packages installed here cannot load the model: ModuleNotFoundError"
    assert f"its formatter 'other' cannot be run: {cause}" in problem.message
    assert problem.fatal
    monkeypatch.setattr(builder, "conflicts", lambda: ["one"])
    with pytest.raises(PluginError, match=cause):
        build(tmp_path / "other", formatter("acme_code:Valid"))
    code.write_text(code.read_text("utf-8").replace(broken, "pass"), "utf-8")
    build(tmp_path / "other", formatter("acme_code:Valid"))


def test_a_class_without_its_packages_is_built_with_a_note(tmp_path: Path, code: Path) -> None:
    code.write_text(f"import not_installed_here\n{CODE}", "utf-8")
    reports: list[str] = []
    build(tmp_path / "r", formatter("acme_code:Valid"), report=reports.append)
    notes = [str(p) for p in check_repository(tmp_path / "r") if not p.fatal]
    for lines in (reports, notes):
        assert any("No module named 'not_installed_here'" in line for line in lines)


@pytest.mark.parametrize(("mode", "missing"), [("batch", "generate"), ("step", "stepper")])
def test_a_generator_has_the_methods_of_its_modes(tmp_path: Path, mode: str, missing: str) -> None:
    engine = Generator(
        name="e", summary="", runtime="acme_code:NoFormat", source=None, modes=frozenset({mode})
    )
    driver = Batching(name="d", summary="", runtime="llmserve.runtime:BatchDriver", mode=mode)
    with pytest.raises(PluginError, match=f"generator 'e' {ACME} .* has no method {missing}"):
        build(tmp_path / "r", engine, driver)


@pytest.mark.parametrize("source", ["folder", "huggingface", None])
def test_the_generator_decides_what_a_model_folder_contains(tmp_path: Path, source: Any) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "verse.txt").write_text("a line\n")

    def prepare(context: BuildContext) -> Mapping[str, Any]:
        return context.place(sorted(context.source.path.glob("*.txt")), "model")

    def built(model: str) -> Mapping[str, Any]:
        lines = Generator(
            name="lines", summary="", runtime="acme_lines:Lines", source=source, weights=("*.txt",),
            prepare=prepare,
        )  # fmt: skip
        result = build(tmp_path / "r", lines, model=model, name="m", force=True)
        assert not [p for p in check_repository(tmp_path / "r") if p.fatal]
        return result.manifest.source

    if source == "huggingface":
        with pytest.raises(ModelSourceError, match=r"has no config\.json"):
            built(str(corpus))
        return
    assert built(str(corpus)) == {"kind": "local", "folder": "corpus"}
    assert (tmp_path / "r" / "m" / "1" / "model" / "verse.txt").is_file()
    if source is None:
        assert built("anything") == {"kind": "name", "name": "anything"}
        return
    with pytest.raises(ModelSourceError, match=r"some/where: name a local folder$"):
        built("some/where")
    (corpus / "verse.txt").unlink()
    with pytest.raises(ModelSourceError, match=r"no weights: no \*\.txt in corpus"):
        built(str(corpus))


def fails(context: BuildContext) -> Mapping[str, Any]:
    raise KeyError(context.name)


class Panic(BaseException):
    """As a library in Rust raises it."""


def panics(context: BuildContext) -> Mapping[str, Any]:
    raise Panic(context.name)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (fails, "KeyError: 'm'"),
        (panics, "Panic: m"),
        (lambda context: sys.exit(4), "SystemExit: 4"),
        (lambda context: None, "TypeError: it returned None instead of a mapping"),
        (lambda context: {"path": Path("x")}, "TypeError: Object of type .* is not JSON"),
    ],
)
def test_an_error_in_prepare_names_the_plugin(
    prepare: Callable[[BuildContext], Any], why: str, tmp_path: Path
) -> None:
    words = Tokenizer(name="words", summary="", runtime="json:loads", prepare=prepare)
    expected = f"^prepare of tokenizer 'words' {ACME} failed: {why}"
    with pytest.raises(PluginError, match=expected) as caught:
        build(tmp_path / "r", words, name="m")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "r").glob("m*"))


BAD_TOKENIZER = """
from llmserve.plugin import Tokenizer, hookimpl

@hookimpl
def llmserve_register_tokenizers():
    return [Tokenizer(name="words", summary="", runtime="json:loads", prepare=prepare)]

def prepare(context):
    raise KeyError("vocab")
"""


@pytest.mark.parametrize("traceback", ["", "1"])
def test_the_command_line_prints_one_line_and_the_traceback_on_request(
    traceback: str, tmp_path: Path
) -> None:
    install(tmp_path, "acme", "[llmserve.api3]\nacme = acme_module\n", acme_module=BAD_TOKENIZER)
    args = ["build", "--plugin", "hf", "--model", "demo", "--tokenizer", "words", "--output"]
    env = {"PYTHONPATH": str(tmp_path), "LLMSERVE_TRACEBACK": traceback, "PATH": ""}
    done = run(*args, str(tmp_path / "r"), env=env)
    assert done.returncode == 3
    *traceback_lines, last = done.stderr.splitlines()
    assert "prepare of tokenizer 'words' of plugin 'acme' (acme 1.2) failed: KeyError" in last
    assert "this is a bug" not in last
    assert any("in prepare" in line for line in traceback_lines) == bool(traceback)


SERVER_PARTS = """
from dataclasses import replace
from pathlib import Path
from llmserve.plugin import Backend, Frontend, hookimpl

@hookimpl
def llmserve_register_frontends():
    return [Frontend(name="web", summary="", command=lambda place: 1 / 0)]

@hookimpl
def llmserve_register_backends():
    return [Backend(name="echo", summary="", folder=Path(__file__).parent)]
"""


def test_an_error_that_keeps_a_server_from_starting_names_the_plugin(tmp_path: Path) -> None:
    for name in ("acme", "bolt"):
        entries = f"[llmserve]\n{name} = {name}_module\n"
        install(tmp_path, name, entries, **{f"{name}_module": SERVER_PARTS})
    (tmp_path / "r").mkdir()
    env = {"PYTHONPATH": str(tmp_path), "PATH": "", "LLMSERVE_PLUGINS": "acme"}
    serve = ["serve", str(tmp_path / "r"), "--runtime", "embedded", "--frontend"]
    errors = run(*serve, "web", "--port", "0", env=env).stderr
    assert "frontend 'web' cannot be started: ZeroDivisionError: division by zero: leave" in errors
    env["LLMSERVE_PLUGINS"] = "acme,bolt"
    (tmp_path / "r" / "needy").mkdir()
    (tmp_path / "r" / "needy" / "config.pbtxt").write_text('backend: "echo"', encoding="utf-8")
    errors = run(*serve, "none", env=env).stderr
    assert "backend 'echo' is registered by 'acme' (acme 1.2) and by 'bolt' (bolt 1.2): " in errors


@pytest.mark.parametrize("runtime", ["nor.x:Y", "llmserve.nowhere:Y", "json.decoder.x:Y", "json"])
def test_an_unknown_runtime_is_reported_at_build_time(tmp_path: Path, runtime: str) -> None:
    with pytest.raises(PluginError, match=f"formatter 'other' {ACME} cannot be run"):
        build(tmp_path / "r", formatter(runtime))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("required", ["tokenizers>=0.20", "torch[cpu]", "", "a b", "acme @ x"])
def test_a_requirement_that_is_not_a_name_is_refused(tmp_path: Path, required: str) -> None:
    with pytest.raises(PluginError, match="which is not a distribution name: ranges and extras"):
        build(tmp_path / "r", formatter(requires=("numpy", required)))


@pytest.mark.parametrize("runtime", ["", ":", "a:", ":b", "a b:c", "a..b:c", "a:b:c", "a.b:c.d"])
def test_a_runtime_that_names_no_class_is_reported(runtime: str) -> None:
    assert "not of the form" in str(problem_with(runtime))


def test_looking_for_a_module_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").touch()
    (tmp_path / "heavy" / "part.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "part.py").touch()
    (tmp_path / "stretched").mkdir()
    (tmp_path / "stretched" / "__init__.py").write_text(
        "import os\n__path__.append(os.path.abspath('elsewhere'))"
    )
    code = (
        "from llmserve.repository.runtimes import problem_with\n"
        "assert problem_with('heavy.part:X') is None\n"
        "assert problem_with('heavy.other:X') == 'there is no module heavy.other'\n"
        "assert problem_with('stretched.part:X') is None"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def with_part(*suffixes: str) -> Generator:
    def prepare(context: BuildContext) -> Mapping[str, Any]:
        for suffix in suffixes:
            part = context.add_part(suffix, backend="onnxruntime")
            (part.folder / "model.onnx").write_text("a graph")
        return {}

    return Generator(
        name="lines", summary="", runtime="acme_lines:Lines", source=None, prepare=prepare
    )


def test_a_model_that_calls_another_is_checked_as_one_without(repo: Path) -> None:
    result = build(repo, with_part("graph"), name="m")
    assert (result.manifest.parts, result.manifest.backends) == (["m_graph"], ["onnxruntime"])
    repository = Repository.open(repo)
    assert repository.models["m_graph"].part_of == "m"
    assert repository.with_parts(["m"]) == ("m_graph", "m")
    assert (repo / "m" / "client.py").is_file()
    assert not (repo / "m_graph" / "client.py").exists()
    with pytest.raises(PluginError, match="NoFormat has no method format"):
        build(repo, with_part("graph"), formatter("acme_code:NoFormat"), name="n")


def test_a_model_is_not_added_twice_nor_to_a_part(repo: Path) -> None:
    with pytest.raises(PluginError, match="two models of one build are called 'm_graph'"):
        build(repo, with_part("graph", "graph"), name="m")

    def prepare(context: BuildContext) -> Mapping[str, Any]:
        context.add_part(name=context.name)
        return {}

    with pytest.raises(PluginError, match="two models of one build are called 'm'"):
        build(repo, replace(with_part(), prepare=prepare), name="m")

    def assemble(assembly: Assembly) -> None:
        assembly.context.add_part("graph")

    generator = Generator(
        name="lines", summary="", runtime="acme_lines:Lines", source=None, assemble=assemble
    )
    with pytest.raises(PluginError, match="added to a part instead of the assembly"):
        build(repo, generator, name="m")
