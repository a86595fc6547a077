"""The command ``llmserve deploy``, which writes files and does not touch a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from llmserve.plugin import FileCommand
from llmserve_deploy.configured import settings_of

_FOLDER = click.Path(path_type=Path, file_okay=False)
_COUNT = click.IntRange(1)


@click.group()
def deploy() -> None:
    """Write the files that deploy a repository to other machines.

    \b
    llmserve deploy kubernetes model_repository --out k8s --gpus 1 --check
    """


def _command(
    target: str, about: str, *,
    replicated: bool = True, dashboard: bool = True, gateway_image: str = "llmserve-gateway",
) -> click.Command:  # fmt: skip
    """Return a subcommand; ``replicated`` ones run the models on several machines."""
    replication = [
        click.Option(["--replicas"], type=_COUNT, default=2, show_default=True,
                     help="Minimum number of pods, each a gateway and a Triton."),
        click.Option(["--max-replicas"], type=click.IntRange(0), default=0,
                     help="Maximum number of pods, by default twice --replicas."),
        click.Option(["--cpus"], default="2", show_default=True,
                     help="CPU request per Triton."),
        click.Option(["--memory"], default="8Gi", show_default=True, help="Memory per Triton."),
        click.Option(["--open-metrics"], is_flag=True, help="Serve /metrics without a key."),
        click.Option(["--volume"], default="",
                     help="PersistentVolumeClaim that contains the repository."),
    ]  # fmt: skip
    parameters: list[click.Parameter] = [
        click.Argument(["repository"], type=_FOLDER, default=Path("model_repository")),
        click.Option(["--config"], type=click.Path(path_type=Path, dir_okay=False, exists=True),
                     help="Read repository, models and settings from this file "
                     "[default: llmserve.toml, if it is here]."),
        click.Option(["--out"], type=_FOLDER, required=True, help="Folder to write to."),
        click.Option(["--name"], default="llmserve", show_default=True, help="Deployment name."),
        click.Option(
            ["--model", "models"], multiple=True, help="Deploy only this model; repeat for several."
        ),
        click.Option(["--image"], default="", help="Name of Triton's image."),
        click.Option(["--gateway-image"], default=gateway_image, show_default=True,
                     help="Name of the gateway's image."),
        click.Option(["--gpus"], type=click.IntRange(0), default=0, show_default=True,
                     help="GPUs per Triton."),
        *(replication if replicated else []),
        click.Option(["--concurrency"], type=_COUNT, default=32, show_default=True,
                     help="Concurrent requests per Triton; the others wait."),
        click.Option(["--grace"], type=_COUNT, default=30, show_default=True,
                     help="Seconds for requests in flight at shutdown."),
        click.Option(["--no-auth"], is_flag=True, help="Require no keys: a proxy in front does."),
        click.Option(["--check", "wants_check"], is_flag=True, help="Check the files, offline."),
        click.Option(["--vendor"], is_flag=True,
                     help="Put the wheels of llmserve and its gateway beside the Dockerfile."),
        click.Option(["--force"], is_flag=True, help="Overwrite existing files."),
    ]  # fmt: skip
    if dashboard:
        summary = "Also write a dashboard for Grafana and alerts."
        parameters.append(click.Option(["--dashboard"], is_flag=True, help=summary))
    return FileCommand(
        target, params=parameters, help=about, callback=partial(_deploy, target),
        subject="repository", verb="deploy", options=settings_of,
    )  # fmt: skip


def _deploy(
    target: str,
    repository: Path,
    out: Path,
    *,
    config: Path | None,
    wants_check: bool,
    force: bool,
    vendor: bool,
    dashboard: bool = False,
    **settings: Any,
) -> None:
    del config  # FileCommand has read it.
    from llmserve.errors import UsageError
    from llmserve.plugin import server_file_of, wheels_named
    from llmserve_deploy.description import describe
    from llmserve_deploy.files import rendered, write
    from llmserve_deploy.images import vendored_wheels
    from llmserve_deploy.targets import files_of, next_steps

    if repository.resolve() in out.resolve().parents:
        raise UsageError(
            f"{out} is in the repository, where Triton treats every folder as a model",
            hint="name another folder with --out",
        )
    if wants_check:
        from llmserve_deploy.checking import check, require_packages

        # Before anything is written: it is the check that somebody wants.
        require_packages()
    wheels = vendored_wheels() if vendor else {}
    settings["wheels"] = wheels_named(wheels)
    file = server_file_of(click.get_current_context())
    settings["texts"] = dict(file.texts) if file is not None else {}
    deployment = describe(repository, baked=target != "compose", **settings)
    files = rendered(files_of(target, deployment, out, dashboard=dashboard)) | wheels
    write(files, out, force=force)
    if wants_check:
        check(out, list(files))
    for name in files:
        click.echo(str(out / name))
    click.echo("\n" + "\n".join(next_steps(target, deployment, out, dashboard)), err=True)


for _subcommand in (
    _command("compose", "Docker Compose, on one machine.", replicated=False),
    _command("kubernetes", "Kubernetes, with kustomize."),
    _command("kserve", "KServe, and a pool for the Gateway API inference extension."),
    _command(
        "ray", "Ray Serve, and KubeRay's RayService.",
        dashboard=False, gateway_image="llmserve-ray",
    ),
):  # fmt: skip
    deploy.add_command(_subcommand)
