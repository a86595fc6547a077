"""What would not load in a model repository, found without a server and said in plain words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.errors import ConfigError, reason
from llmserve.registry import Registry
from llmserve.repository import config as modelconfig
from llmserve.repository.config import ModelConfig
from llmserve.repository.manifest import Manifest, model_folders, parts_of
from llmserve.repository.problems import CheckedModel, Problem
from llmserve.repository.runtimes import check_models, problem_with
from llmserve.roles import ROLES
from llmserve.runtime.contract import MANIFEST

__all__ = ["Problem", "check_repository"]

_BUILT = "llmserve.recipe"
"""A parameter that every model has which llmserve built."""
_PLACEHOLDER = re.compile(r"\$\{(\w*)\}?")


def check_repository(
    repository: Path,
    registry: Registry | None = None,
    *,
    models: Sequence[str] = (),
    quick: bool = False,
    served_here: bool = True,
) -> list[Problem]:
    """Return everything that is wrong with a repository, model by model.

    ``models`` are the only ones that are looked at, with their parts. A ``quick`` check, which
    takes less than a second, looks whether files and modules are there; else files are read and
    classes imported too. What is installed matters where the models are ``served_here`` and not
    in a container. Plugins add what only they can see.
    """
    if not repository.is_dir():
        return [Problem(str(repository), "there is no such folder", "llmserve build makes one")]
    every = model_folders(repository)
    if not every:
        return [Problem(str(repository), "it holds no model", "llmserve build makes one")]
    registry = registry or Registry.load()
    asked = {name for each in models for name in (*parts_of(repository, each), each)}
    folders = [folder for folder in every if folder.name in asked or not models]
    problems: list[Problem] = []
    configs: dict[str, ModelConfig] = {}
    manifests: dict[str, Manifest] = {}
    for folder in every:
        config, found = _read(folder)
        if folder in folders:
            problems += found
        if config is not None:
            configs[folder.name] = config
    for folder in folders:
        if (config := configs.get(folder.name)) is not None:
            problems += check_config(folder, config)
            problems += check_ensemble(folder, config, configs)
            problems += ask_plugins(registry, CheckedModel(folder, config, configs))
        try:
            manifest = Manifest.read(folder)
        except ConfigError as error:
            problems.append(Problem(folder.name, error.problem, error.mend or "build it again"))
            continue
        # A plugin's check that asks for a parameter of Protobuf adds it, empty.
        if not manifest and config and config.parameters[_BUILT].string_value:
            problems.append(Problem(folder.name, f"{MANIFEST} is missing", "build it again"))
        if manifest is not None:
            manifests[folder.name] = manifest
            problems += check_files(folder, manifest, quick=quick)
            problems += check_components(folder, manifest)
            if served_here:
                problems += check_needs(folder.name, manifest)
    if served_here and not quick:
        problems += check_runtime_classes(manifests, registry)
    # What Triton looks for and what was built are often one file.
    return list({(one.model, one.what): one for one in reversed(problems)}.values())[::-1]


def ask_plugins(registry: Registry, model: CheckedModel) -> Iterator[Problem]:
    for plugin, check in registry.implementations("llmserve_check_model"):
        try:
            for problem in check(model=model):
                if not isinstance(problem, Problem):
                    raise TypeError(f"it returned {problem!r} and not a Problem")
                yield problem
        except (Exception, SystemExit) as error:
            # A stranger's check must not keep the others' from being read.
            what = f"the check of plugin {plugin} failed: {reason(error)}"
            yield Problem(model.name, what, "leave the plugin out, or mend it", fatal=False)


def _read(folder: Path) -> tuple[ModelConfig | None, list[Problem]]:
    path = folder / modelconfig.FILE
    if not path.is_file():
        what, mend = "it is no model", "move the folder out: Triton stops over it"
        if modelconfig.versions(folder):
            what, mend = f"{modelconfig.FILE} is missing", "build it again"
        return None, [Problem(folder.name, what, mend)]
    text = path.read_text(encoding="utf-8", errors="replace")
    if unfilled := ", ".join(dict.fromkeys(_unfilled(text, quoted=False))):
        return None, [
            Problem(folder.name, f"placeholders are not filled in: {unfilled}", "give each a value")
        ]
    # As text, one can be read: TensorRT-LLM takes it for a parameter that is not set.
    warnings = []
    if unset := ", ".join(dict.fromkeys(_unfilled(text, quoted=True))):
        mend = "take it out if the default is meant, else give it a value"
        warnings.append(Problem(folder.name, f"{unset} is not filled in", mend, fatal=False))
    try:
        return modelconfig.read(folder), warnings
    except ConfigError as error:
        return None, [Problem(folder.name, error.problem, "write it as Triton's ModelConfig says")]


def _unfilled(text: str, *, quoted: bool) -> Iterator[str]:
    """Find template placeholders outside of comments: those within quotes, or the others."""
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


Report = Callable[..., Problem]
"""``Problem`` of one model: it takes what is wrong, what mends it, and whether it is fatal."""


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
                "KIND_GPU without gpus makes a copy of the model on every GPU",
                "list the GPUs, or use KIND_MODEL",
                fatal=False,
            )


def _check_versions(problem: Report, folder: Path, config: ModelConfig) -> Iterator[Problem]:
    versions = modelconfig.versions(folder)
    if not versions:
        yield problem("it has no version folder", "put its files into a folder 1/")
        return
    if config.platform == "ensemble":
        return
    backend = modelconfig.backend_of(config)
    if not backend:
        yield problem("it names no backend", 'write backend: "python", for example')
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
                yield problem(f"{version.name}/{file} is no Python: {error}", "mend it")


def _check_tensors(problem: Report, config: ModelConfig) -> Iterator[Problem]:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        names = [tensor.name for tensor in tensors]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield problem(f"{kind} {name} is declared twice", "declare it once")
        for tensor in tensors:
            if tensor.data_type == pb.DataType.TYPE_INVALID:
                yield problem(f"{kind} {tensor.name} has no data_type", "give it one")
            if not tensor.dims:
                yield problem(f"{kind} {tensor.name} has no dims", "give it dims: 1, say")


def _check_batching(problem: Report, config: ModelConfig) -> Iterator[Problem]:
    scheduler = config.WhichOneof("scheduling_choice")
    if scheduler == "dynamic_batching" and config.max_batch_size < 1:
        yield problem(
            "dynamic_batching needs a batch dimension",
            "set max_batch_size to 1 or more, or take dynamic_batching out",
        )
    for size in config.dynamic_batching.preferred_batch_size:
        if size > config.max_batch_size:
            yield problem(
                f"preferred_batch_size {size} is over max_batch_size {config.max_batch_size}",
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
    folder: Path, config: ModelConfig, configs: Mapping[str, ModelConfig]
) -> Iterator[Problem]:
    """Follow every tensor of an ensemble; ``configs`` are those of all models that can be read."""
    if config.platform != "ensemble":
        return
    problem = partial(Problem, folder.name)
    names = {path.name for path in model_folders(folder.parent)}
    types = {tensor.name: tensor.data_type for tensor in config.input}
    read: set[str] = set()
    for step in config.ensemble_scheduling.step:
        if step.model_name not in names:
            yield problem(
                f"its step {step.model_name} is no model of this repository",
                f"build {step.model_name} too, or name another model",
            )
        part = configs.get(step.model_name)
        read.update(step.input_map.values())
        if part is not None:
            yield from _check_step(problem, step, part)
            if (size := part.max_batch_size) < config.max_batch_size:
                yield problem(
                    f"its max_batch_size is {config.max_batch_size} and {part.name}'s {size}",
                    "give the ensemble no more than its steps take",
                )
        outputs = {tensor.name: tensor.data_type for tensor in part.output} if part else {}
        types.update({ours: outputs.get(theirs) for theirs, ours in step.output_map.items()})
    for step in config.ensemble_scheduling.step:
        part = configs.get(step.model_name)
        inputs = {tensor.name: tensor.data_type for tensor in part.input} if part else {}
        for theirs, ours in sorted(step.input_map.items()):
            made, wanted = types.get(ours), inputs.get(theirs)
            if made and wanted and made != wanted:
                yield problem(
                    f"its {ours} is {_kind(made)} and {step.model_name}'s {theirs} {_kind(wanted)}",
                    "give both the same data_type",
                )
    for name in sorted(read - types.keys()):
        yield problem(f"nothing makes the tensor {name}", "map an output to it")
    for tensor in config.input:
        if tensor.name not in read:
            yield problem(f"its input {tensor.name} goes nowhere", "map it to a step, or remove it")
    for tensor in config.output:
        if tensor.name not in types:
            yield problem(f"its output {tensor.name} comes from nowhere", "map a step's to it")
        elif types[tensor.name] not in (None, tensor.data_type):
            yield problem(
                f"its output {tensor.name} has another data_type than the step's",
                "give both the same",
            )


def _kind(data_type: int) -> str:
    return str(pb.DataType.Name(data_type)).removeprefix("TYPE_")


def _check_step(problem: Report, step: ModelConfig, part: ModelConfig) -> Iterator[Problem]:
    inputs = {tensor.name: tensor.optional for tensor in part.input}
    outputs = {tensor.name for tensor in part.output}
    for name in sorted(step.input_map.keys() - inputs.keys()):
        yield problem(f"{step.model_name} has no input {name}", "mend the input_map")
    for name in sorted(step.output_map.keys() - outputs):
        yield problem(f"{step.model_name} has no output {name}", "mend the output_map")
    for name, optional in inputs.items():
        if not optional and name not in step.input_map:
            yield problem(f"{step.model_name} needs its input {name}", "map a tensor to it")


# A recipe is what chose the components, not one of them.
_ROLES = ROLES.keys() - {"recipe", "backend", "frontend", "tool_parser"}


def check_files(folder: Path, manifest: Manifest, *, quick: bool) -> Iterator[Problem]:
    """Compare a model's files with what was built; ``quick`` sees only which are missing."""
    if missing := manifest.missing(folder):
        more = f"and {len(missing) - 1} more are missing" if missing[1:] else "is missing"
        yield Problem(folder.name, f"{missing[0]} {more}", "build it again")
    for edit in () if quick else manifest.edits(folder):
        yield Problem(folder.name, edit, "build it again, if that was not meant", fatal=False)


def check_components(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    """Check that what a manifest names is there: its components, parts and weights."""
    problem = partial(Problem, folder.name)
    if manifest.name != folder.name:
        yield problem(
            f"its manifest is that of {manifest.name!r}",
            f"call the folder {manifest.name} again, or build it as {folder.name}",
            fatal=False,
        )
    if not manifest.part_of:
        for role in sorted(_ROLES - manifest.components.keys()):
            yield problem(f"its manifest names no {role}", "build it again")
    for part in manifest.parts:
        if not (folder.parent / part).is_dir():
            yield problem(f"its part {part} is missing", "build it again")
    if manifest.part_of and folder.name not in parts_of(folder.parent, manifest.part_of):
        yield problem(
            f"it is a part of {manifest.part_of}, which is not here or no longer needs it",
            "build that again, or move the folder out",
            fatal=False,
        )
    for role, component in manifest.components.items():
        path = component["settings"].get("path", "")
        if path.startswith("/") and not Path(path).is_dir():
            yield problem(
                f"its {role} is kept at {path}, and nothing is there",
                "put it back, or build with --set weights=copy",
            )


def check_needs(model: str, manifest: Manifest) -> Iterator[Problem]:
    """Say which packages of a model are missing here or of another version, and which classes."""
    problem = partial(Problem, model)
    for package, wanted in manifest.packages.items():
        try:
            found = installed_version(package).partition("+")[0]
        except PackageNotFoundError:
            yield problem(
                f"it needs {package}, which is not installed here",
                f"pip install {package}=={wanted}, or serve it from its container",
            )
            continue
        if found != wanted:
            yield problem(
                f"it was built with {package} {wanted}, and {found} is installed here",
                "build it again",
                fatal=False,
            )
    for role, component in manifest.components.items():
        if why := problem_with(component["runtime"]):
            yield problem(
                f"its {role} {component['name']!r} cannot be run: {why}",
                "install the plugin it comes from, or serve it from its container",
            )


def check_runtime_classes(
    manifests: Mapping[str, Manifest], registry: Registry
) -> Iterator[Problem]:
    """Import the classes that models name, in another process, and look at their methods."""
    for model, each, problem in check_models(manifests, registry):
        if problem_with(each.runtime):
            # ``check_needs`` has said so.
            continue
        yield Problem(
            model,
            f"its {each.role} {each.name!r} cannot be run: {problem.what}",
            "install the plugin it comes from again, or tell its author"
            if problem.fatal
            else "serve it from its container, if that has it",
            fatal=problem.fatal,
        )
