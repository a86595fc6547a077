"""``llmserve deploy``: files for more machines. It touches no cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])
_FOLDER = click.Path(path_type=Path, file_okay=False)
_COUNT = click.IntRange(1)


@click.group()
def deploy() -> None:
    """Write what takes a repository to more machines.

    \b
    llmserve deploy kubernetes model_repository --out k8s --gpus 1 --check
    """


def _options(
    *, replicated: bool, dashboard: bool = True, gateway_image: str = "llmserve-gateway"
) -> Callable[[C], C]:
    """Return what the subcommands share; ``replicated`` ones put the models onto many machines."""
    found = [
        click.argument("repository", type=_FOLDER, default=Path("model_repository")),
        click.option("--out", type=_FOLDER, required=True, help="Folder to write to."),
        click.option("--name", default="llmserve", show_default=True, help="Its name there."),
        click.option(
            "--model", "models", multiple=True, help="Deploy only this; repeat for several."
        ),
        click.option("--image", default="", help="What Triton's image is called."),
        click.option("--gateway-image", default=gateway_image, show_default=True,
                     help="What the gateway's image is called."),
        click.option("--gpus", type=click.IntRange(0), default=0, show_default=True,
                     help="GPUs of one Triton."),
        click.option("--concurrency", type=_COUNT, default=32, show_default=True,
                     help="Requests that one Triton answers at a time; the others wait."),
        click.option("--grace", type=_COUNT, default=30, show_default=True,
                     help="Seconds for what is under way at the end."),
        click.option("--no-auth", is_flag=True, help="Ask for no keys: something in front does."),
        click.option("--check", "wants_check", is_flag=True, help="Check the files, offline."),
        click.option("--force", is_flag=True, help="Write over what is there."),
    ]  # fmt: skip
    if dashboard:
        found.append(
            click.option(
                "--dashboard", is_flag=True, help="Grafana's dashboard and alerts as well."
            )
        )
    if replicated:
        found[7:7] = [
            click.option("--replicas", type=_COUNT, default=2, show_default=True,
                         help="Pods at least, each a gateway and a Triton."),
            click.option("--max-replicas", type=click.IntRange(0), default=0,
                         help="Pods at most; by default twice as many."),
            click.option("--cpus", default="2", show_default=True, help="What a Triton asks for."),
            click.option("--memory", default="8Gi", show_default=True, help="Its memory."),
            click.option("--open-metrics", is_flag=True, help="Tell metrics without a key."),
            click.option("--volume", default="",
                         help="PersistentVolumeClaim that holds the repository."),
        ]  # fmt: skip

    def add(command: C) -> C:
        for option in reversed(found):
            command = option(command)
        return command

    return add


@deploy.command()
@_options(replicated=False)
def compose(**given: Any) -> None:
    """Docker Compose, on one machine."""
    _deploy("compose", **given)


@deploy.command()
@_options(replicated=True)
def kubernetes(**given: Any) -> None:
    """Kubernetes, with kustomize."""
    _deploy("kubernetes", **given)


@deploy.command()
@_options(replicated=True)
def kserve(**given: Any) -> None:
    """KServe, and a pool for the Gateway API inference extension."""
    _deploy("kserve", **given)


@deploy.command()
@_options(replicated=True, dashboard=False, gateway_image="llmserve-ray")
def ray(**given: Any) -> None:
    """Ray Serve, and KubeRay's RayService."""
    _deploy("ray", **given)


def _deploy(
    target: str,
    repository: Path,
    out: Path,
    *,
    wants_check: bool,
    force: bool,
    dashboard: bool = False,
    **settings: Any,
) -> None:
    from llmserve_deploy.description import describe
    from llmserve_deploy.files import rendered, write
    from llmserve_deploy.targets import files_of, next_steps

    deployment = describe(repository, baked=target != "compose", **settings)
    files = rendered(files_of(target, deployment, out, dashboard=dashboard))
    write(files, out, force=force)
    if wants_check:
        from llmserve_deploy.checking import check

        check(out, list(files))
    for name in files:
        click.echo(str(out / name))
    click.echo("\n" + "\n".join(next_steps(target, deployment, out, dashboard)), err=True)
