"""``llmserve deploy``: files for more machines. It touches no cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

_FOLDER = click.Path(path_type=Path, file_okay=False)
_COUNT = click.IntRange(1)


@click.group()
def deploy() -> None:
    """Write what takes a repository to more machines.

    \b
    llmserve deploy kubernetes model_repository --out k8s --gpus 1 --check
    """


def _command(
    target: str, about: str, *,
    replicated: bool = True, dashboard: bool = True, gateway_image: str = "llmserve-gateway",
) -> click.Command:  # fmt: skip
    """Make a subcommand; ``replicated`` ones put the models onto many machines."""
    found: list[click.Parameter] = [
        click.Argument(["repository"], type=_FOLDER, default=Path("model_repository")),
        click.Option(["--out"], type=_FOLDER, required=True, help="Folder to write to."),
        click.Option(["--name"], default="llmserve", show_default=True, help="Its name there."),
        click.Option(
            ["--model", "models"], multiple=True, help="Deploy only this; repeat for several."
        ),
        click.Option(["--image"], default="", help="What Triton's image is called."),
        click.Option(["--gateway-image"], default=gateway_image, show_default=True,
                     help="What the gateway's image is called."),
        click.Option(["--gpus"], type=click.IntRange(0), default=0, show_default=True,
                     help="GPUs of one Triton."),
        click.Option(["--concurrency"], type=_COUNT, default=32, show_default=True,
                     help="Requests that one Triton answers at a time; the others wait."),
        click.Option(["--grace"], type=_COUNT, default=30, show_default=True,
                     help="Seconds for what is under way at the end."),
        click.Option(["--no-auth"], is_flag=True, help="Ask for no keys: something in front does."),
        click.Option(["--check", "wants_check"], is_flag=True, help="Check the files, offline."),
        click.Option(["--force"], is_flag=True, help="Write over what is there."),
    ]  # fmt: skip
    if dashboard:
        wanted = "Grafana's dashboard and alerts as well."
        found.append(click.Option(["--dashboard"], is_flag=True, help=wanted))
    if replicated:
        found[7:7] = [
            click.Option(["--replicas"], type=_COUNT, default=2, show_default=True,
                         help="Pods at least, each a gateway and a Triton."),
            click.Option(["--max-replicas"], type=click.IntRange(0), default=0,
                         help="Pods at most; by default twice as many."),
            click.Option(["--cpus"], default="2", show_default=True,
                         help="What a Triton asks for."),
            click.Option(["--memory"], default="8Gi", show_default=True, help="Its memory."),
            click.Option(["--open-metrics"], is_flag=True, help="Tell metrics without a key."),
            click.Option(["--volume"], default="",
                         help="PersistentVolumeClaim that holds the repository."),
        ]  # fmt: skip
    return click.Command(target, params=found, help=about, callback=partial(_deploy, target))


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
    from llmserve.errors import UsageError
    from llmserve_deploy.description import describe
    from llmserve_deploy.files import rendered, write
    from llmserve_deploy.targets import files_of, next_steps

    if repository.resolve() in out.resolve().parents:
        raise UsageError(
            f"{out} lies in the repository, where Triton takes every folder for a model",
            mend="name another folder with --out",
        )
    deployment = describe(repository, baked=target != "compose", **settings)
    files = rendered(files_of(target, deployment, out, dashboard=dashboard))
    write(files, out, force=force)
    if wants_check:
        from llmserve_deploy.checking import check

        check(out, list(files))
    for name in files:
        click.echo(str(out / name))
    click.echo("\n" + "\n".join(next_steps(target, deployment, out, dashboard)), err=True)


for _made in (
    _command("compose", "Docker Compose, on one machine.", replicated=False),
    _command("kubernetes", "Kubernetes, with kustomize."),
    _command("kserve", "KServe, and a pool for the Gateway API inference extension."),
    _command(
        "ray", "Ray Serve, and KubeRay's RayService.",
        dashboard=False, gateway_image="llmserve-ray",
    ),
):  # fmt: skip
    deploy.add_command(_made)
