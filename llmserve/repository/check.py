"""Checks a model repository for whatever would not load, without a server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.builder.causal import KINDS
from llmserve.builder.hub.lookup import cached
from llmserve.builder.source import is_checkpoint, is_unbuilt_model
from llmserve.builder.source_files import check_code, config_files
from llmserve.builder.weights.check import check_weights
from llmserve.contract.names import MANIFEST
from llmserve.demo import DEMO
from llmserve.errors import ModelSourceError, reason
from llmserve.packages import (
    EMBEDDED,
    OLD_NUMPY,
    has_embedded,
    install_command,
    remedy,
    too_new_numpy,
)
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import MODEL_ROLES
from llmserve.problems import Problem
from llmserve.repository import config as modelconfig
from llmserve.repository.config import ModelConfig
from llmserve.repository.handwritten import check_handwritten
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import CheckedModel, Model, Repository
from llmserve.repository.runtimes import check_models, problem_with
from llmserve.runtime.lora import ADAPTERS

__all__ = ["Problem", "check_repository", "not_a_repository"]

_BUILT = "llmserve.recipe"
"""A parameter in the configuration of every model that llmserve built."""
_PLACEHOLDER = re.compile(r"\$\{(\w*)\}?")


def check_repository(
    repository: Path | Repository,
    registry: Registry | None = None,
    *,
    models: Sequence[str] = (),
    quick: bool = False,
    served_here: bool = True,
) -> list[Problem]:
    """Return all problems of a repository, model by model.

    If ``models`` is given, only those and their parts are checked. A ``quick`` check, which takes
    less than a second, checks that files and modules exist; otherwise files are also read and
    classes imported. Installed packages are checked only if the models are ``served_here`` and not
    in a container. Plugins add problems that only they can detect.
    """
    if isinstance(repository, Path):
        repository = Repository.open(repository)
    path = repository.path
    if (problem := not_a_repository(path)) is not None:
        return [problem]
    if not repository.models:
        what = "it contains no model" if path.is_dir() else "no such folder"
        return [Problem(str(path), what, "create one with llmserve build")]
    registry = registry or Registry.load()
    selected = repository.with_parts(models) if models else repository.models
    checked = [model for model in repository if model.name in selected]
    found = {model.name: list(check_readable(model)) for model in repository}
    configs = {
        model.name: model.config
        for model in repository
        if model.config is not None and not any(problem.fatal for problem in found[model.name])
    }
    problems = [problem for model in checked for problem in found[model.name]]
    for model in checked:
        if (config := configs.get(model.name)) is not None:
            problems += check_config(model.folder, config)
            problems += check_ensemble(model.name, config, configs, repository.models)
            if not quick and not model.manifest and not model.damage:
                problems += check_handwritten(model.folder, config)
            problems += ask_plugins(registry, CheckedModel(model.folder, config, configs))
        if model.damage:
            problems.append(Problem.of(model.damage, model.name, hint="build it again"))
        # Reading a missing Protobuf map entry, as a plugin's check may, adds an empty one.
        elif not model.manifest and config and config.parameters[_BUILT].string_value:
            problems.append(Problem(model.name, f"{MANIFEST} is missing", "build it again"))
        elif model.manifest:
            problems += check_files(model, quick=quick)
            problems += check_components(repository, model, model.manifest)
            code = list(check_code_of(model.folder, model.manifest))
            problems += code
            # What takes code from elsewhere is not loaded, not even without its weights.
            if not quick and not code:
                problems += check_weights_of(model, model.manifest)
            if served_here:
                problems += check_needs(model.name, model.manifest)
    if served_here and has_embedded() and (numpy := too_new_numpy()):
        what = f"it needs {OLD_NUMPY} and this is {numpy}"
        problems.append(Problem(EMBEDDED, what, install_command(OLD_NUMPY), fatal=False))
    if served_here and not quick:
        problems += check_runtime_classes(checked, registry)
    # The files that Triton loads are also in the manifest, so a missing one is reported twice.
    return list({(p.where, p.message): p for p in reversed(problems)}.values())[::-1]


def not_a_repository(path: Path) -> Problem | None:
    """Return what a path is instead of a repository, with the command that serves it."""
    quoted = shlex.quote(str(path))
    if is_unbuilt_model(path):
        hint = f"llmserve build --model {quoted} && llmserve serve"
        return Problem(str(path), "it is a model that is not built yet", hint)
    if (path / modelconfig.FILE).is_file():
        parent = path.absolute().parent if path.parent == path else path.parent
        hint = f"llmserve serve {shlex.quote(str(parent))} --model {path.absolute().name}"
        return Problem(str(path), "it is a model, not a repository", hint)
    return None


def ask_plugins(registry: Registry, model: CheckedModel) -> Iterator[Problem]:
    for plugin, check in registry.implementations("llmserve_check_model"):
        try:
            for problem in check(model=model):
                if not isinstance(problem, Problem):
                    raise TypeError(f"it returned {problem!r} instead of a Problem")
                yield problem
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # A failing third-party check must not suppress other problems.
            what = f"the check of plugin {plugin} failed: {reason(error)}"
            yield Problem(model.name, what, "fix the plugin, or leave it out", fatal=False)


def check_readable(model: Model) -> Iterator[Problem]:
    """Check that a model has a configuration which says all that it must."""
    problem = partial(Problem, model.name)
    path = model.folder / modelconfig.FILE
    if not path.is_file():
        what, hint = "it is not a model", "move the folder out: Triton does not start with it"
        if modelconfig.versions(model.folder):
            what, hint = f"{modelconfig.FILE} is missing", "build it again"
        yield problem(what, hint)
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if unfilled := ", ".join(dict.fromkeys(_unfilled(text, quoted=False))):
        yield problem(f"placeholders are not filled in: {unfilled}", "give each a value")
        return
    if model.config_damage:
        yield problem(model.config_damage.problem, "write it as a Triton ModelConfig")
    # A quoted placeholder can be parsed: TensorRT-LLM treats it as a parameter that is not set.
    elif unset := ", ".join(dict.fromkeys(_unfilled(text, quoted=True))):
        hint = "remove it to use the default, or give it a value"
        yield problem(f"{unset} is not filled in", hint, fatal=False)


def _unfilled(text: str, *, quoted: bool) -> Iterator[str]:
    """Find template placeholders outside comments: those within quotes, or the others."""
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split("#", 1)[0]
        for match in _PLACEHOLDER.finditer(code):
            if quoted == bool(code[: match.start()].count('"') % 2):
                yield f"${{{match[1]}}} in line {number}"


_FILES = {
    "python": "model.py",
    "onnxruntime": "model.onnx",
    "pytorch": "model.pt",
    "tensorrt": "model.plan",
}


MakeProblem = Callable[..., Problem]
"""Makes a ``Problem`` of one model from its ``what``, ``hint`` and ``fatal``."""


def check_config(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    problem = partial(Problem, folder.name)
    if config.name and config.name != folder.name:
        yield problem(
            f"its configuration is called {config.name!r}",
            "give the folder and the configuration the same name",
        )
    yield from _check_versions(problem, folder, config)
    yield from _check_tensors(problem, config)
    yield from _check_batching(problem, config)
    for group in config.instance_group:
        if group.kind == pb.ModelInstanceGroup.KIND_GPU and not group.gpus:
            yield problem(
                "KIND_GPU without gpus places a copy of the model on every GPU",
                "list the GPUs, or use KIND_MODEL",
                fatal=False,
            )


def _check_versions(problem: MakeProblem, folder: Path, config: ModelConfig) -> Iterator[Problem]:
    versions = modelconfig.versions(folder)
    if not versions:
        yield problem("it has no version folder", "put its files into a folder 1/")
        return
    if config.platform == "ensemble":
        return
    backend = modelconfig.backend_of(config)
    if not backend:
        yield problem("it names no backend", 'add one, such as backend: "python"')
        return
    file = config.default_model_filename or _FILES.get(backend, "")
    for version in versions if file else ():
        path = version / file
        if not path.exists():
            yield problem(
                f"{version.name}/{file} is missing", f"the {backend} backend loads that file"
            )
        elif backend == "python":
            try:
                compile(path.read_bytes(), str(path), "exec")
            except (SyntaxError, ValueError) as error:
                yield problem(f"{version.name}/{file} is not valid Python: {error}", "fix it")


def _check_tensors(problem: MakeProblem, config: ModelConfig) -> Iterator[Problem]:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        names = [tensor.name for tensor in tensors]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield problem(f"{kind} {name} is declared twice", "declare it once")
        for tensor in tensors:
            if tensor.data_type == pb.DataType.TYPE_INVALID:
                yield problem(f"{kind} {tensor.name} has no data_type", "give it one")
            if not tensor.dims:
                yield problem(f"{kind} {tensor.name} has no dims", "give it some, such as dims: 1")


def _check_batching(problem: MakeProblem, config: ModelConfig) -> Iterator[Problem]:
    scheduler = config.WhichOneof("scheduling_choice")
    if scheduler == "dynamic_batching" and config.max_batch_size < 1:
        yield problem(
            "dynamic_batching needs a batch dimension",
            "set max_batch_size to 1 or more, or remove dynamic_batching",
        )
    for size in config.dynamic_batching.preferred_batch_size:
        if size > config.max_batch_size:
            yield problem(
                f"preferred_batch_size {size} exceeds max_batch_size {config.max_batch_size}",
                "lower one or raise the other",
            )
    sequence = config.sequence_batching
    if sequence.iterative_sequence and not config.model_transaction_policy.decoupled:
        yield problem(
            "iterative_sequence on a model that is not decoupled answers once at the end",
            "set model_transaction_policy { decoupled: true } to stream",
            fatal=False,
        )


def check_ensemble(
    name: str, config: ModelConfig, configs: Mapping[str, ModelConfig], names: Collection[str]
) -> Iterator[Problem]:
    """Trace every tensor of an ensemble; ``configs`` has those of all readable models."""
    if config.platform != "ensemble":
        return
    problem = partial(Problem, name)
    types = {tensor.name: tensor.data_type for tensor in config.input}
    used: set[str] = set()
    for step in config.ensemble_scheduling.step:
        if step.model_name not in names:
            yield problem(
                f"its step {step.model_name} is not a model of this repository",
                f"build {step.model_name} too, or name another model",
            )
        part = configs.get(step.model_name)
        used.update(step.input_map.values())
        if part is not None:
            yield from _check_step(problem, step, part)
            if (size := part.max_batch_size) < config.max_batch_size:
                yield problem(
                    f"its max_batch_size is {config.max_batch_size} and {part.name}'s {size}",
                    "give the ensemble no more than its steps accept",
                )
        outputs = {tensor.name: tensor.data_type for tensor in part.output} if part else {}
        types.update({name: outputs.get(output) for output, name in step.output_map.items()})
    for step in config.ensemble_scheduling.step:
        part = configs.get(step.model_name)
        inputs = {tensor.name: tensor.data_type for tensor in part.input} if part else {}
        for input_name, name in sorted(step.input_map.items()):
            actual, expected = types.get(name), inputs.get(input_name)
            if actual and expected and actual != expected:
                step_input = f"{step.model_name}'s {input_name} {_type_name(expected)}"
                yield problem(
                    f"its {name} is {_type_name(actual)} and {step_input}",
                    "give both the same data_type",
                )
    for name in sorted(used - types.keys()):
        yield problem(f"nothing produces the tensor {name}", "map an output to it")
    for tensor in config.input:
        if tensor.name not in used:
            yield problem(f"no step uses its input {tensor.name}", "map it to a step, or remove it")
    for tensor in config.output:
        if tensor.name not in types:
            yield problem(f"nothing produces its output {tensor.name}", "map a step's output to it")
        elif types[tensor.name] not in (None, tensor.data_type):
            yield problem(
                f"its output {tensor.name} has another data_type than the step's",
                "give both the same",
            )


def _type_name(data_type: int) -> str:
    return str(pb.DataType.Name(data_type)).removeprefix("TYPE_")


def _check_step(problem: MakeProblem, step: ModelConfig, part: ModelConfig) -> Iterator[Problem]:
    inputs = {tensor.name: tensor.optional for tensor in part.input}
    outputs = {tensor.name for tensor in part.output}
    for name in sorted(step.input_map.keys() - inputs.keys()):
        yield problem(f"{step.model_name} has no input {name}", "fix the input_map")
    for name in sorted(step.output_map.keys() - outputs):
        yield problem(f"{step.model_name} has no output {name}", "fix the output_map")
    for name, optional in inputs.items():
        if not optional and name not in step.input_map:
            yield problem(f"{step.model_name} needs its input {name}", "map a tensor to it")


def check_files(model: Model, *, quick: bool) -> Iterator[Problem]:
    """Compare a model's files with its manifest; ``quick`` only finds missing ones."""
    if missing := model.missing():
        more = f"and {len(missing) - 1} more are missing" if missing[1:] else "is missing"
        yield Problem(model.name, f"{missing[0]} {more}", "build it again")
    for edit in () if quick else model.edits():
        if f"/{ADAPTERS}/" in edit:
            # `llmserve adapter` adds and replaces them.
            continue
        yield Problem(model.name, edit, "build it again if that was not intended", fatal=False)


def check_components(repository: Repository, model: Model, manifest: Manifest) -> Iterator[Problem]:
    """Check that everything that a manifest names exists: components, parts and weights."""
    problem = partial(Problem, model.name)
    if manifest.name != model.name:
        yield problem(
            f"its manifest is that of {manifest.name!r}",
            f"rename the folder to {manifest.name}, or build it as {model.name}",
            fatal=False,
        )
    if not manifest.part_of:
        for role in sorted(MODEL_ROLES.keys() - manifest.components.keys()):
            yield problem(f"its manifest names no {role}", "build it again")
    for part in manifest.parts:
        if part not in repository.models:
            yield problem(f"its part {part} is missing", "build it again")
    if manifest.part_of and model.name not in repository.built_with(manifest.part_of):
        yield problem(
            f"it is a part of {manifest.part_of}, which is not here or no longer needs it",
            "build that model again, or move the folder out",
            fatal=False,
        )
    for role, component in manifest.components.items():
        path = component["settings"].get("path", "")
        if path.startswith("/") and not Path(path).is_dir():
            yield problem(
                f"its {role} is stored at {path}, where there is no folder",
                "put it back, or build with --set weights=copy",
            )


def check_code_of(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Check that no part would fetch code, as a build does: files can be edited afterwards."""
    found = [component["settings"].get("path") for component in manifest.components.values()]
    paths = {path for path in found if path and isinstance(path, str)}
    for version in modelconfig.versions(folder):
        for path in sorted(paths):
            try:
                check_code(config_files(version / path), trusted=False)
            except ModelSourceError as error:
                yield Problem.of(error, folder.name, hint="build it again")


def check_weights_of(model: Model, manifest: Manifest) -> Iterator[Problem]:
    """Check that weights are whole, as a build does; those outside may have changed since."""
    kind = KINDS.get(manifest.task)
    # Our own is whole, unless somebody has edited it.
    if kind is None or (manifest.source.get("kind") == DEMO and not model.edits()):
        return
    for component in manifest.components.values():
        settings = component["settings"]
        for placed in (settings, settings.get("draft")):
            folder = _weights_folder(model, placed) if isinstance(placed, Mapping) else None
            if folder is None:
                continue
            try:
                check_weights(
                    folder,
                    asked="it",
                    loader=kind.loader,
                    trust_remote_code=manifest.trust_remote_code,
                    pickle=bool(settings.get("pickle")),
                )
            except ModelSourceError as error:
                yield Problem.of(error, model.name, hint="build it again")


def _weights_folder(model: Model, settings: Mapping[str, Any]) -> Path | None:
    """Return where a component's checkpoint is; None if it has none, or it is not here."""
    if isinstance(path := settings.get("path"), str) and path:
        folder: Path | None = model.last_version / path
    elif settings.get("id") and settings.get("revision"):
        # One that is not here is downloaded when the model is loaded.
        folder = cached(str(settings["id"]), str(settings["revision"]))
    else:
        return None
    return folder if folder and is_checkpoint(folder) else None


def check_needs(model: str, manifest: Manifest) -> Iterator[Problem]:
    """Check that a model's packages and classes are installed here, in the right versions."""
    problem = partial(Problem, model)
    for package, expected in manifest.packages.items():
        address = manifest.origins.get(package)
        try:
            installed = installed_version(package).partition("+")[0]
        except PackageNotFoundError:
            wanted = f"{package} @ {address}" if address else f"{package}=={expected}"
            yield problem(
                f"it needs {package}, which is not installed here",
                f"{install_command(wanted)}, or serve it from its container",
            )
            continue
        if installed != expected:
            yield problem(
                f"it was built with {package} {expected}, and {installed} is installed here",
                "build it again",
                fatal=False,
            )
    for role, component in manifest.components.items():
        if class_problem := problem_with(component["runtime"]):
            yield problem(
                f"its {role} {component['name']!r} cannot be run: {class_problem}",
                "install the plugin it comes from, and start again a `llmserve serve` that ran "
                "before; or serve it from its container",
            )


def check_runtime_classes(models: Iterable[Model], registry: Registry) -> Iterator[Problem]:
    """Import the classes that models name, and what they need, in another process."""
    for runtime_class, problem in check_models(models, registry, imports=True):
        if problem_with(runtime_class.runtime):
            # ``check_needs`` reports it.
            continue
        what = f"its {runtime_class.role} {runtime_class.name!r} cannot be run: {problem.message}"
        hint = "serve it from its container, if that has the package"
        if problem.fatal:
            hint = remedy("install its plugin again, or report it to the plugin's author")
        yield replace(problem, message=what, hint=hint)
