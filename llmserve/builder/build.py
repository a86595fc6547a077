"""Builds a model from a spec into a repository: plan, stage, publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
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
from llmserve.packages import conflicts, remedy
from llmserve.registry import Registry
from llmserve.repository import config as modelconfig
from llmserve.repository import dockerfile
from llmserve.repository.dockerfile import PLAIN
from llmserve.repository.manifest import Manifest
from llmserve.repository.publish import MODELS, check_output, publish, staging
from llmserve.repository.runtimes import check_models
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
    **options: object,
) -> BuildResult:
    """Build a model into a repository, as ``llmserve build`` does."""
    chosen = (tokenizer, generator, batching, formatter)
    return build_spec(BuildSpec(plugin, model, name, Path(output), *chosen, options, force))


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
            manifest = _build_ensemble(plan, context, packages, assemble)
        else:
            manifest = _build_fused(plan, context, packages)
        _check_classes(plan, registry, scratch / MODELS, report)
        publish(scratch, spec.output, name, force=spec.force)
    image_owner = "" if manifest.image == PLAIN else name
    return BuildResult(
        name=name,
        repository=spec.output,
        manifest=manifest,
        dockerfile=spec.output / image_owner / dockerfile.FILE,
        docker_build=dockerfile.docker_build(spec.output, image_owner, manifest.image),
        docker_run=dockerfile.docker_run(spec.output, image_owner, manifest.image),
    )


def _build_fused(plan: Plan, context: BuildContext, packages: Mapping[str, str]) -> Manifest:
    """Write a model that runs all components itself, with its client and manifest."""
    config = context.config
    config.backend = "python"
    modelconfig.add_inputs(config, plan.inputs)
    modelconfig.add_outputs(config, (*plan.formatter.outputs, *plan.generator.outputs))
    context.write_entry()
    components = {role: plan.prepare(role, context) for role in PARTS}
    _write_config(plan, context)
    _write_client(plan, context)
    return _write_manifest(plan, context, components, packages)


def _build_ensemble(
    plan: Plan, context: BuildContext, packages: Mapping[str, str], assemble: Assemble
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
        _write_manifest(plan, part.context, part.components, {}, part_of=context.name)
    _write_config(plan, context, parts=names)
    _write_client(plan, context)
    return _write_manifest(plan, context, prepared, packages, parts=names)


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
    *,
    part_of: str = "",
    parts: Sequence[str] = (),
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
        trust_remote_code=bool(plan.options["trust_remote_code"]),
        llmserve=__version__,
        part_of=part_of,
        parts=sorted(parts),
        image=container.image if container else "",
        brought=sorted(container.brings) if container else (),
    )
    if container:
        folder = context.folder.parent
        text = dockerfile.of_model(context.name, manifest, folder)
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
