"""From a spec to a model in a repository: plan → stage → publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmserve import modelconfig
from llmserve.builder import dockerfile
from llmserve.builder.context import BuildContext
from llmserve.builder.fused import VERSION_FOLDER, write_model
from llmserve.builder.plan import make_plan
from llmserve.builder.publish import check_output, publish
from llmserve.builder.requirements import check_runtimes, needed_packages
from llmserve.builder.spec import DEFAULT_OUTPUT, BuildResult, BuildSpec
from llmserve.builder.staging import staging
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
    check_output(spec.output, name, force=spec.force)
    # Publishing asks again under its lock; asked here too, it is told before much is copied.
    dockerfile.updated(spec.output, name, packages)
    with staging(spec.output) as scratch:
        folder = scratch / name
        context = BuildContext(
            name=name,
            model=spec.model,
            options=plan.options,
            folder=folder / VERSION_FOLDER,
            config=modelconfig.new_config(
                name,
                backend="python",
                max_batch_size=int(plan.options.get("max_batch_size", 0)),
            ),
            report=report,
        )
        manifest = write_model(plan, context, folder, packages)
        publish(folder, spec.output, name, force=spec.force)
    return BuildResult(
        name=name,
        repository=spec.output,
        manifest=manifest,
        dockerfile=spec.output / dockerfile.FILE,
        docker_run=dockerfile.docker_run(spec.output),
    )
