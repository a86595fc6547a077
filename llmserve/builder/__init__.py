"""From a spec to a model in a repository: plan → stage → publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from llmserve import modelconfig
from llmserve.builder import dockerfile
from llmserve.builder.assembly import Assembly
from llmserve.builder.context import BuildContext
from llmserve.builder.fused import write_fused
from llmserve.builder.needs import PLAIN, Needs
from llmserve.builder.papers import VERSION_FOLDER
from llmserve.builder.plan import Plan, make_plan
from llmserve.builder.publish import check_output, publish
from llmserve.builder.requirements import check_runtimes, needed_packages
from llmserve.builder.spec import DEFAULT_OUTPUT, BuildResult, BuildSpec
from llmserve.builder.staging import MODELS, staging
from llmserve.manifest import Manifest
from llmserve.registry import Registry

__all__ = ["DEFAULT_OUTPUT", "BuildResult", "BuildSpec", "build", "build_spec"]


def build(
    plugin: str,
    model: str,
    *,
    name: str | None = None,
    output: str | Path = DEFAULT_OUTPUT,
    tokenizer: str | None = None,
    batching: str | None = None,
    formatter: str | None = None,
    force: bool = False,
    **options: object,
) -> BuildResult:
    """Build a model into a repository, as ``llmserve build`` does.

    >>> build("hf", "demo", output="model_repository", max_batch_size=16)  # doctest: +SKIP
    BuildResult(name='demo', ...)
    """
    spec = BuildSpec(
        plugin=plugin,
        model=model,
        name=name,
        output=Path(output),
        tokenizer=tokenizer,
        batching=batching,
        formatter=formatter,
        options=options,
        force=force,
    )
    return build_spec(spec)


def build_spec(
    spec: BuildSpec,
    *,
    registry: Registry | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> BuildResult:
    """Build what a spec asks for; a failed build leaves the repository as it was."""
    name = spec.model_name
    plan = make_plan(spec, registry or Registry.load())
    check_runtimes(plan)
    packages = needed_packages(plan)
    check_output(spec.output, [name], force=spec.force)
    # Publishing asks again under its lock; asked here too, it is told before much is copied.
    dockerfile.updated(spec.output, {name: Needs(packages)}, newest=name)
    with staging(spec.output) as scratch:
        context = BuildContext(
            name=name,
            model=spec.model,
            options=plan.options,
            folder=scratch / MODELS / name / VERSION_FOLDER,
            config=modelconfig.new_config(
                name,
                backend="",
                max_batch_size=int(plan.options.get("max_batch_size", 0)),
            ),
            report=report,
            weights=plan.generator.weights,
        )
        manifest = _write(plan, context, packages)
        publish(scratch, spec.output, name, force=spec.force)
    needs = Needs.of(manifest) or Needs()
    own = "" if needs.image == PLAIN else name
    return BuildResult(
        name=name,
        repository=spec.output,
        manifest=manifest,
        dockerfile=spec.output / own / dockerfile.FILE,
        docker_build=dockerfile.docker_build(spec.output, own, needs),
        docker_run=dockerfile.docker_run(spec.output, own),
    )


def _write(plan: Plan, context: BuildContext, packages: Mapping[str, str]) -> Manifest:
    """Write one model, or the several that the generator needs."""
    if plan.generator.assemble is None:
        return write_fused(plan, context, packages)
    assembly = Assembly(plan, context)
    plan.generator.assemble(assembly)
    return assembly.finish(packages)
