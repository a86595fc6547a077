"""Builds a model from a spec into a repository: plan, stage, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

from llmserve.builder.adapters import ADAPTER_OPTIONS, check_adapters
from llmserve.builder.client_script import client_script
from llmserve.builder.context import BuildContext
from llmserve.builder.ensemble import Assembly
from llmserve.builder.plan import (
    REQUEST_OPTIONS,
    BuildResult,
    BuildSpec,
    Plan,
    installed_packages,
    make_plan,
    needed_packages,
)
from llmserve.builder.progress import Note
from llmserve.builder.size import size_in, with_draft
from llmserve.builder.weights.quantised import quantised_in
from llmserve.contract.container import PYTHONS
from llmserve.contract.shared_stream import NUMBER
from llmserve.contract.tasks import GENERATE, TOKENS
from llmserve.contract.tensors import TEXT_FORMAT_OUTPUTS, TEXT_INPUT, Tensor
from llmserve.errors import ModelKindError, PluginError, UnservedError
from llmserve.names import normal
from llmserve.packages import conflicts, origin, python_of, remedy, runs_with
from llmserve.plugins.quantised import Quantised
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import MODEL_ROLES, Assemble, Generator, Recipe
from llmserve.problems import Problem
from llmserve.repository import config as modelconfig
from llmserve.repository import dockerfile
from llmserve.repository.config import ModelConfig
from llmserve.repository.dockerfile import image_for
from llmserve.repository.draft import Draft, write
from llmserve.repository.manifest import Manifest
from llmserve.repository.publish import MODELS, WHEELS, check_output, publish, staging
from llmserve.repository.repository import Repository
from llmserve.repository.runtimes import RuntimeClass, check_models
from llmserve.repository.wheels import (
    fits_any_python,
    make_wheels,
    wheels_in,
    without_index,
)
from llmserve.version import __version__

__all__ = ["BuildResult", "BuildSpec", "build_spec"]

VERSION_FOLDER = "1"
SCRATCH = "scratch"


def build_spec(
    spec: BuildSpec,
    *,
    registry: Registry | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> BuildResult:
    """Build a model from a spec; a failed build leaves the repository unchanged.

    The plan is made first, then its components prepare their files, and then all is published.
    """
    name = spec.model_name
    registry = registry or Registry.load()
    plan = make_plan(spec, registry)
    for notice in plan.notices:
        report(Note(notice))
    packages = needed_packages(plan)
    inputs, outputs = plan.inputs, [tensor for tensor, _ in plan.outputs]
    check_output(spec.output, [name], force=spec.force)
    # Publishing checks this again under its lock; check it here too, before large files are copied.
    dockerfile.updated(Repository.open(spec.output), {name: None}, newest=name)
    with staging(spec.output) as stage:
        if spec.vendor:
            _vendor(plan, packages, stage / WHEELS, report, Repository.open(spec.output), name)
        context = BuildContext(
            name=name,
            model=spec.model,
            options=plan.options,
            folder=stage / MODELS / name / VERSION_FOLDER,
            config=modelconfig.new_config(
                name, backend="", max_batch_size=int(plan.options.get("max_batch_size") or 0)
            ),
            report=report,
            weights=plan.generator.weights,
            source_kind=plan.generator.source,
            keeps_gguf=plan.generator.keeps_gguf(plan.options),
            quantised=plan.generator.quantised,
            scratch=stage / SCRATCH,
        )
        if not plan.generator.assemble:
            modelconfig.add_inputs(context.config, inputs)
            modelconfig.add_outputs(context.config, outputs)
        if ADAPTER_OPTIONS[0] in plan.generator.options:
            check_adapters(context.options, report)
        _check_quantised(plan, context, registry)
        try:
            drafts = _prepare(plan, context, inputs, packages)
        except ModelKindError as error:
            raise _with_recipes(error, registry) from None
        except UnservedError as error:
            raise _with_another(error, plan, context, registry) from None
        write(drafts, wheels_in(stage / WHEELS))
        # Trying the imports takes seconds, so a build does it only where packages conflict.
        staged = Repository.open(stage / MODELS)
        for runtime, problem in check_models(staged, registry, imports=bool(conflicts())):
            _refuse_or_report(plan, runtime, problem, report)
        publish(stage, spec.output, name, force=spec.force)
    repository = Repository.open(spec.output)
    image = image_for(repository, [name])
    found = wheels_in(spec.output)
    return BuildResult(
        name=name,
        repository=spec.output,
        manifest=drafts[-1].manifest,
        dockerfile=image.dockerfile,
        docker_build=image.build,
        docker_run=image.run,
        without_index=tuple(without_index(sorted(dict(packages.items() - found.keys())))),
    )


def _installed(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return ""


def _vendor(
    plan: Plan,
    packages: Mapping[str, str],
    folder: Path,
    report: Callable[[str], None],
    repository: Repository,
    name: str,
) -> None:
    """Make the wheels that are needed: of llmserve, plugins, and what is from no index."""
    plugins = {normal(plugin.origin) for plugin in plan.plugins.values()} | {"llmserve"}
    manifests = dockerfile.manifests_of(repository, without={name}).values()
    others = {n: v for m in manifests if m for n, v in m.packages.items()}
    chosen = {}
    for package, wanted in {**others, **packages}.items():
        # A model that was built with another version has to be built again anyway.
        if _installed(package) == wanted and (package in plugins or origin(package)):
            if fits_any_python(package):
                chosen[package] = wanted
            else:
                report(f"{package} has compiled parts: put its wheel for the image there yourself")
    make_wheels(chosen, folder, report=report)


def _prepare(
    plan: Plan, context: BuildContext, inputs: Sequence[Tensor], packages: Mapping[str, str]
) -> list[Draft]:
    """Prepare the model, after the models that it consists of, if there are any."""
    if assemble := plan.generator.assemble:
        return _prepare_ensemble(plan, context, inputs, packages, assemble)
    return _prepare_fused(plan, context, packages)


def _check_quantised(plan: Plan, context: BuildContext, registry: Registry) -> None:
    """Refuse a checkpoint whose weights the generator cannot read as they are."""
    is_checkpoint = plan.generator.source == "huggingface"
    found = quantised_in(context.source.path) if is_checkpoint else None
    if found is None:
        return
    with plan.errors_of("generator", "quantised"):
        if plan.generator.quantised(found):
            return
    raise UnservedError(
        f"{context.source.asked} is quantised ({found}), which {plan.recipe.name} does not compute",
        hint=f"{_taken_by(found, plan, registry)}name what it was made from in 16 bits",
    )


def _taken_by(found: Quantised, plan: Plan, registry: Registry) -> str:
    """Name the recipes for the same answers that compute such a checkpoint."""
    taking = {
        generator.name
        for generator in registry.all(Generator)
        if generator.source == "huggingface"
        and generator.answers == plan.generator.answers
        and generator.quantised(found)
    }
    names = sorted(recipe.name for recipe in registry.all(Recipe) if recipe.generator in taking)
    return f"build it with --plugin {' or '.join(names)}, or " if names else ""


def _with_recipes(error: ModelKindError, registry: Registry) -> ModelKindError:
    """Name the recipes that serve models of this kind, unless a remedy is named."""
    generators = {
        generator.name
        for generator in registry.all(Generator)
        if any(name.endswith(generator.architectures) for name in error.architectures)
    }
    recipes = [r.name for r in registry.all(Recipe) if r.generator in generators]
    hint = f"build it with --plugin {' or '.join(sorted(recipes))}" if recipes else None
    return ModelKindError(error.problem, error.architectures, hint=error.hint or hint)


def _with_another(
    error: UnservedError, plan: Plan, context: BuildContext, registry: Registry
) -> UnservedError:
    """Name the recipe that computes this model: the best of those that compute more."""
    recipes, kind = registry.recipes_for(str(plan.options.get("device", "auto")))
    limit = plan.recipe.suits.get(kind, inf)
    for recipe in [each for each in recipes if each.suits[kind] < limit]:
        generator = registry.get(Generator, recipe.generator)
        with suppress(UnservedError):
            if generator.accepts:
                generator.accepts(context)
            return UnservedError(error.problem, hint=f"build it with --plugin {recipe.name}")
    return error


def _prepare_fused(plan: Plan, context: BuildContext, packages: Mapping[str, str]) -> list[Draft]:
    """Prepare a model that runs all components itself, after those that it calls."""
    context.config.backend = "python"
    context.write_entry()
    components = {role: plan.prepare(role, context) for role in MODEL_ROLES}
    packages = {**packages, **installed_packages(plan, context.required)}
    parts = context.parts
    drafts = [_draft(plan, part, {}, {}, part_of=context.name) for part in parts.values()]
    backends = {part.config.backend for part in parts.values()}
    whole = _draft(plan, context, components, packages, parts=[*parts], backends=backends)
    return [*drafts, whole]


def _prepare_ensemble(
    plan: Plan,
    context: BuildContext,
    inputs: Sequence[Tensor],
    packages: Mapping[str, str],
    assemble: Assemble,
) -> list[Draft]:
    """Prepare the models that the generator assembles; the ensemble, which names them, is last."""
    assembly = Assembly(
        context,
        inputs=inputs,
        outputs=plan.formatter.outputs,
        chosen={role: component.name for role, component in plan.components()},
        prepare=plan.prepare,
    )
    with plan.errors_of("generator", "assemble"):
        assemble(assembly)
    parts = assembly.parts.values()
    if [*context.parts] != [*assembly.parts] or any(part.context.parts for part in parts):
        raise PluginError("a model was added to a part instead of the assembly")
    prepared = {}
    for role in MODEL_ROLES:
        components = [part.components[role] for part in parts if role in part.components]
        if not components:
            raise PluginError(f"{plan.describe(role)} was chosen but is in none of the models")
        prepared[role] = components[0]
    context.folder.mkdir(parents=True, exist_ok=True)
    # Triton requires a version folder even without files, and git does not keep empty folders.
    (context.folder / ".keep").touch()
    # The ensemble's manifest lists the packages: all models run in the same environment.
    drafts = [
        _draft(plan, part.context, part.components, {}, part_of=context.name) for part in parts
    ]
    backends = {part.context.config.backend for part in parts}
    whole = _draft(plan, context, prepared, packages, parts=[*assembly.parts], backends=backends)
    config = context.config
    if not config.input:
        modelconfig.add_inputs(config, inputs)
    if not config.output:
        modelconfig.add_outputs(config, plan.formatter.outputs)
    if not _asks(plan.recipe.client, config):
        whole = replace(whole, client="")
    return [*drafts, whole]


def _asks(client: str, config: ModelConfig) -> bool:
    """Return whether a client can ask a model: ours send ``text_input``, others are not known."""
    ours = client.startswith("llmserve.client.")
    return not ours or any(tensor.name == TEXT_INPUT.name for tensor in config.input)


def _refuse_or_report(
    plan: Plan, runtime: RuntimeClass, problem: Problem, report: Callable[[str], None]
) -> None:
    """Refuse to publish what Triton could not run."""
    is_stage = runtime.role == "stage"
    component = f"stage {runtime.name!r}" if is_stage else plan.describe(runtime.role)
    if problem.fatal:
        hint = remedy("report it to the plugin's author")
        raise PluginError(f"{component} cannot be run: {problem.message}", hint=hint)
    report(f"{component}: {problem.message}")


def _draft(
    plan: Plan,
    context: BuildContext,
    components: Mapping[str, Any],
    packages: Mapping[str, str],
    *,
    part_of: str = "",
    parts: Sequence[str] = (),
    backends: Iterable[str] = (),
) -> Draft:
    """Return what is to be written beside the files that the components have prepared."""
    # The requested model's manifest records the image that all models of the build need.
    container = None if part_of else context.container
    if container:
        # Packages are installed without dependencies, and llmserve cannot be imported without this.
        packages = {**packages, "pluggy": version("pluggy")}
    manifest = Manifest(
        name=context.name,
        recipe=plan.recipe.name,
        plugin=plan.plugins["recipe"].origin,
        exchange=context.exchange,
        source=context.source.described(),
        options=dict(plan.options),
        components=components,
        contract={**contract_of(plan, context.taken), **_shared_streams(plan, context)},
        packages=packages,
        backends=sorted({*backends} - {"python", ""}),
        origins={n: found.url for n in packages if (found := origin(n)) and found.url},
        pythons=_pythons(packages),
        trust_remote_code=bool(plan.options["trust_remote_code"]),
        llmserve=__version__,
        part_of=part_of,
        parts=sorted(parts),
        image=container.image if container else "",
        brought=sorted(container.brings) if container else (),
        triton=container.triton if container else "",
        size=_size(plan, context),
    )
    client = "" if part_of else client_script(plan.recipe.client)
    return Draft(context.folder.parent, context.config, manifest, client)


def _size(plan: Plan, context: BuildContext) -> dict[str, Any]:
    """Return what decides how much memory the model takes, if its generator says how much."""
    if plan.generator.needs is None or context.source.path.is_file():
        return {}
    found = size_in(context.source.path, plan.generator.weights)
    if found is None:
        return {}
    found = replace(found, is_on_hub=bool(context.source.repo_id))
    return with_draft(found, plan.options).content()


def _pythons(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python that packages ask for, if an image may have another."""
    required = {name: python_of(name) for name in packages}
    return {n: r for n, r in required.items() if not all(runs_with(r, p) for p in PYTHONS)}


def _shared_streams(plan: Plan, context: BuildContext) -> dict[str, int]:
    """Return which shared streams a model has: it makes its streams itself, of standard pieces."""
    standard = {tensor.name for tensor in TEXT_FORMAT_OUTPUTS}
    is_standard = {tensor.name for tensor in plan.formatter.outputs} == standard
    makes_streams = context.exchange == "stream" and plan.generator.assemble is None
    return {"shared_stream": NUMBER} if makes_streams and is_standard else {}


def contract_of(plan: Plan, taken: Sequence[Tensor] = ()) -> dict[str, Any]:
    """Return what the runtime must know about requests besides the configured tensors.

    ``taken`` are inputs that this model has beside those of the plan.
    """
    described: dict[str, Any] = {
        "inputs": sorted(tensor.name for tensor in (*plan.inputs, *taken)),
        "defaults": {o.name: plan.options.get(o.name, o.default) for o in REQUEST_OPTIONS},
        "extras": sorted(plan.extras),
        "outputs": [
            {
                "name": tensor.name,
                "data_type": tensor.data_type,
                "dims": tensor.dims,
                "optional": optional,
                **({"vector": True} if tensor.vector else {}),
            }
            for tensor, optional in plan.outputs
        ],
    }
    if plan.formatter.task != GENERATE:
        described["task"] = plan.formatter.task
    if plan.generator.answers != TOKENS:
        described["answers"] = plan.generator.answers
    return described
