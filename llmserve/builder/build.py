"""From a spec to a model in a repository: plan, stage, publish."""

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
    """Build what a spec asks for; a failed build leaves the repository as it was."""
    name = spec.model_name
    registry = registry or Registry.load()
    plan = make_plan(spec, registry)
    for notice in plan.notices:
        report(notice)
    packages = needed_packages(plan)
    check_output(spec.output, [name], force=spec.force)
    # Publishing asks again under its lock; asked here too, before much is copied.
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
    own = "" if manifest.image == PLAIN else name
    return BuildResult(
        name=name,
        repository=spec.output,
        manifest=manifest,
        dockerfile=spec.output / own / dockerfile.FILE,
        docker_build=dockerfile.docker_build(spec.output, own, manifest.image),
        docker_run=dockerfile.docker_run(spec.output, own),
    )


def _build_fused(plan: Plan, context: BuildContext, packages: Mapping[str, str]) -> Manifest:
    """Write one model that does it all: entry, files, configuration, client and manifest."""
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
    """Write the models that the generator needs; the ensemble's manifest names all the others."""
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
        made = [part.components[role] for part in parts if role in part.components]
        if not made:
            raise PluginError(f"{plan.whose(role)} was chosen and is in no model")
        prepared[role] = made[0]
    config = context.config
    if not config.input:
        modelconfig.add_inputs(config, plan.inputs)
    if not config.output:
        modelconfig.add_outputs(config, plan.formatter.outputs)
    context.folder.mkdir(parents=True)
    # Triton wants a version folder even of a model without files, and git keeps no empty one.
    (context.folder / ".keep").touch()
    names = tuple(assembly.parts)
    for part in parts:
        _write_config(plan, part.context)
        # The packages are the ensemble's: all run in the same environment.
        _write_manifest(plan, part.context, part.components, {}, part_of=context.name)
    _write_config(plan, context, parts=names)
    _write_client(plan, context)
    return _write_manifest(plan, context, prepared, packages, parts=names)


def _check_classes(
    plan: Plan, registry: Registry, models: Path, report: Callable[[str], None]
) -> None:
    """Refuse to publish what Triton could not run."""
    manifests = {
        folder.name: manifest
        for folder in sorted(models.iterdir())
        if (manifest := Manifest.read(folder))
    }
    for _, each, problem in check_models(manifests, registry):
        whose = plan.whose(each.role) if each.role != "stage" else f"stage {each.name!r}"
        if problem.fatal:
            raise PluginError(
                f"{whose} cannot be run: {problem.what}", mend="tell the plugin's author"
            )
        report(f"{whose}: {problem.what}")


def _write_config(plan: Plan, context: BuildContext, *, parts: Sequence[str] = ()) -> None:
    """Write ``config.pbtxt``, with what a client reads from a running server.

    ``parts`` are all models that answer under this one's name: an ensemble's steps do not name
    those that another of them asks.
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
    found = find_spec(plan.recipe.client)
    if found is None or not found.origin:
        raise PluginError(f"the recipe's client {plan.recipe.client} cannot be found")
    source = Path(found.origin).read_text(encoding="utf-8")
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
    """Write the manifest, which holds the hash of every other file and so comes last."""
    # Of a build's models, the one that was asked for says what all of them need.
    container = None if part_of else context.container
    if container:
        # Installed without what they depend on, and llmserve cannot be imported without this.
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
    """Return what the runtime must know of requests beside the tensors in the configuration."""
    return {
        "inputs": sorted(tensor.name for tensor in plan.inputs),
        "defaults": {option.name: plan.options[option.name] for option in REQUEST_OPTIONS},
        "extras": sorted(plan.extras),
        # What the formatter fills in, and what it may fill in only with what the generator gives.
        "outputs": [
            {
                "name": each.name,
                "data_type": each.data_type,
                "dims": each.dims,
                "optional": optional,
            }
            for part, optional in ((plan.formatter, False), (plan.generator, True))
            for each in part.outputs
        ],
    }
