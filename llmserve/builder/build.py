"""Builds a model from a spec into a repository: plan, stage, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.builder.context import BuildContext
from llmserve.builder.ensemble import Assembly
from llmserve.builder.plan import (
    DEFAULT_OUTPUT,
    PARTS,
    REQUEST_OPTIONS,
    BuildResult,
    BuildSpec,
    Plan,
    make_plan,
    needed_packages,
)
from llmserve.errors import PluginError
from llmserve.names import normal
from llmserve.packages import conflicts, origin, remedy
from llmserve.registry import Registry
from llmserve.repository import config as modelconfig
from llmserve.repository import dockerfile
from llmserve.repository.manifest import Manifest
from llmserve.repository.publish import MODELS, WHEELS, check_output, publish, staging
from llmserve.repository.runtimes import check_models
from llmserve.repository.wheels import (
    Wheels,
    fits_any_python,
    make_wheels,
    wheels_in,
    without_index,
)
from llmserve.roles import Assemble
from llmserve.version import __version__

__all__ = ["DEFAULT_OUTPUT", "BuildResult", "BuildSpec", "build", "build_spec"]

VERSION_FOLDER = "1"


def build(
    plugin: str,
    model: str,
    *,
    name: str | None = None,
    output: str | Path = DEFAULT_OUTPUT,
    tokenizer: str | None = None,
    generator: str | None = None,
    batching: str | None = None,
    formatter: str | None = None,
    force: bool = False,
    vendor: bool = False,
    **options: object,
) -> BuildResult:
    """Build a model into a repository, as ``llmserve build`` does."""
    chosen = (tokenizer, generator, batching, formatter)
    return build_spec(BuildSpec(plugin, model, name, Path(output), *chosen, options, force, vendor))


def build_spec(
    spec: BuildSpec,
    *,
    registry: Registry | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> BuildResult:
    """Build a model from a spec; a failed build leaves the repository unchanged."""
    name = spec.model_name
    registry = registry or Registry.load()
    plan = make_plan(spec, registry)
    for notice in plan.notices:
        report(notice)
    packages = needed_packages(plan)
    check_output(spec.output, [name], force=spec.force)
    # Publishing checks this again under its lock; check it here too, before large files are copied.
    dockerfile.updated(spec.output, {name: None}, newest=name)
    with staging(spec.output) as scratch:
        if spec.vendor:
            models = dockerfile.manifests_of(spec.output, without={name}).values()
            others = {n: v for m in models if m for n, v in m.packages.items()}
            vendored = _vendored(plan, {**others, **packages}, report)
            make_wheels(vendored, scratch / WHEELS, report=report)
        wheels = wheels_in(scratch / WHEELS)
        context = BuildContext(
            name=name,
            model=spec.model,
            options=plan.options,
            folder=scratch / MODELS / name / VERSION_FOLDER,
            config=modelconfig.new_config(
                name, backend="", max_batch_size=int(plan.options.get("max_batch_size", 0))
            ),
            report=report,
            weights=plan.generator.weights,
            source_kind=plan.generator.source,
        )
        if assemble := plan.generator.assemble:
            manifest = _build_ensemble(plan, context, packages, assemble, wheels)
        else:
            manifest = _build_fused(plan, context, packages, wheels)
        _check_classes(plan, registry, scratch / MODELS, report)
        publish(scratch, spec.output, name, force=spec.force)
    manifests = dockerfile.manifests_of(spec.output, ignore_damaged=True)
    served, separate = dockerfile.groups(manifests)
    image_owner = name if name in separate else ""
    image = manifest.image if image_owner else dockerfile.base_image(served)
    found = wheels_in(spec.output)
    return BuildResult(
        name=name,
        repository=spec.output,
        manifest=manifest,
        dockerfile=spec.output / image_owner / dockerfile.FILE,
        docker_build=dockerfile.docker_build(spec.output, image_owner, image),
        docker_run=dockerfile.docker_run(spec.output, image_owner, image),
        without_index=tuple(
            without_index(n for n, version in packages.items() if (n, version) not in found)
        ),
    )


def _installed(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return ""


def _vendored(
    plan: Plan, packages: Mapping[str, str], report: Callable[[str], None]
) -> dict[str, str]:
    """Return the packages whose wheels are needed: llmserve, plugins, and what is from no index."""
    plugins = {normal(plugin.origin) for plugin in plan.plugins.values()} | {"llmserve"}
    chosen = {}
    for name in packages:
        # A model that was built with another version has to be built again anyway.
        if _installed(name) == packages[name] and (name in plugins or origin(name)):
            if fits_any_python(name):
                chosen[name] = packages[name]
            else:
                report(f"{name} has compiled parts: put its wheel for the image there yourself")
    return chosen


def _build_fused(
    plan: Plan, context: BuildContext, packages: Mapping[str, str], wheels: Wheels
) -> Manifest:
    """Write a model that runs all components itself, with its client and manifest."""
    config = context.config
    config.backend = "python"
    modelconfig.add_inputs(config, plan.inputs)
    modelconfig.add_outputs(config, (*plan.formatter.outputs, *plan.generator.outputs))
    context.write_entry()
    components = {role: plan.prepare(role, context) for role in PARTS}
    _write_config(plan, context)
    _write_client(plan, context)
    return _write_manifest(plan, context, components, packages, wheels)


def _build_ensemble(
    plan: Plan,
    context: BuildContext,
    packages: Mapping[str, str],
    assemble: Assemble,
    wheels: Wheels,
) -> Manifest:
    """Write the models that the generator assembles; the ensemble's manifest names the others."""
    assembly = Assembly(
        context,
        inputs=plan.inputs,
        outputs=plan.formatter.outputs,
        chosen={role: component.name for role, component in plan.components()},
        prepare=plan.prepare,
    )
    with plan.errors_of("generator", "assemble"):
        assemble(assembly)
    parts = assembly.parts.values()
    prepared = {}
    for role in PARTS:
        components = [part.components[role] for part in parts if role in part.components]
        if not components:
            raise PluginError(f"{plan.describe(role)} was chosen but is in none of the models")
        prepared[role] = components[0]
    config = context.config
    if not config.input:
        modelconfig.add_inputs(config, plan.inputs)
    if not config.output:
        modelconfig.add_outputs(config, plan.formatter.outputs)
    context.folder.mkdir(parents=True)
    # Triton requires a version folder even without files, and git does not keep empty folders.
    (context.folder / ".keep").touch()
    names = tuple(assembly.parts)
    for part in parts:
        _write_config(plan, part.context)
        # The ensemble's manifest lists the packages: all models run in the same environment.
        _write_manifest(plan, part.context, part.components, {}, {}, part_of=context.name)
    _write_config(plan, context, parts=names)
    _write_client(plan, context)
    backends = {part.context.config.backend for part in parts}
    return _write_manifest(
        plan, context, prepared, packages, wheels, parts=names, backends=backends
    )


def _check_classes(
    plan: Plan, registry: Registry, models: Path, report: Callable[[str], None]
) -> None:
    """Refuse to publish what Triton could not run."""
    manifests = {
        folder: manifest
        for folder in sorted(models.iterdir())
        if (manifest := Manifest.read(folder))
    }
    # Trying the imports takes seconds, so a build does it only where packages conflict.
    for _, runtime, problem in check_models(manifests, registry, imports=bool(conflicts())):
        is_stage = runtime.role == "stage"
        component = f"stage {runtime.name!r}" if is_stage else plan.describe(runtime.role)
        if problem.fatal:
            mend = remedy("report it to the plugin's author")
            raise PluginError(f"{component} cannot be run: {problem.what}", mend=mend)
        report(f"{component}: {problem.what}")


def _write_config(plan: Plan, context: BuildContext, *, parts: Sequence[str] = ()) -> None:
    """Write ``config.pbtxt``, with the parameters that clients read from a running server.

    ``parts`` are all models behind this one's name: an ensemble's steps do not include models that
    are called by another part.
    """
    modelconfig.set_parameters(
        context.config,
        {
            "llmserve.version": __version__,
            "llmserve.recipe": plan.recipe.name,
            "llmserve.exchange": context.exchange,
            **({"llmserve.parts": " ".join(sorted(parts))} if parts else {}),
        },
    )
    text = modelconfig.to_text(context.config)
    (context.folder.parent / modelconfig.FILE).write_text(text, encoding="utf-8")


def _write_client(plan: Plan, context: BuildContext) -> None:
    spec = find_spec(plan.recipe.client)
    if spec is None or not spec.origin:
        raise PluginError(f"the recipe's client {plan.recipe.client} cannot be found")
    source = Path(spec.origin).read_text(encoding="utf-8")
    (context.folder.parent / "client.py").write_text(source, encoding="utf-8")


def _write_manifest(
    plan: Plan,
    context: BuildContext,
    components: Mapping[str, Any],
    packages: Mapping[str, str],
    wheels: Wheels,
    *,
    part_of: str = "",
    parts: Sequence[str] = (),
    backends: Iterable[str] = (),
) -> Manifest:
    """Write the manifest, which contains the hash of every other file and is written last."""
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
        contract=contract_of(plan),
        packages=packages,
        backends=sorted({*backends} - {"python", ""}),
        origins={n: found.url for n in packages if (found := origin(n)) and found.url},
        trust_remote_code=bool(plan.options["trust_remote_code"]),
        llmserve=__version__,
        part_of=part_of,
        parts=sorted(parts),
        image=container.image if container else "",
        brought=sorted(container.brings) if container else (),
    )
    if container:
        folder = context.folder.parent
        text = dockerfile.of_model(context.name, manifest, folder, wheels)
        (folder / dockerfile.FILE).write_text(text, encoding="utf-8")
    manifest.write(context.folder.parent)
    return manifest


def contract_of(plan: Plan) -> dict[str, Any]:
    """Return what the runtime must know about requests besides the configured tensors."""
    return {
        "inputs": sorted(tensor.name for tensor in plan.inputs),
        "defaults": {option.name: plan.options[option.name] for option in REQUEST_OPTIONS},
        "extras": sorted(plan.extras),
        # The formatter always fills in its own outputs, and the generator's if their data is there.
        "outputs": [
            {
                "name": tensor.name,
                "data_type": tensor.data_type,
                "dims": tensor.dims,
                "optional": optional,
            }
            for component, optional in ((plan.formatter, False), (plan.generator, True))
            for tensor in component.outputs
        ],
    }
