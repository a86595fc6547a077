"""Builds the commands that start Triton: an installed server, or one in a container."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from llmserve.contract import container
from llmserve.contract.container import (
    DOCKERFILE,
    HF_HOME,
    LOOPBACK,
    MODELS,
    ULIMITS,
    UNKNOWN,
    Release,
    addresses,
    closed,
    image_of,
    release_from_help,
    release_of_server,
)
from llmserve.contract.names import RENEWED
from llmserve.contract.tensors import declared_texts
from llmserve.errors import ServerError, UsageError
from llmserve.server.settings import Ports, ServerSettings
from llmserve.server.tracing import trace_arguments

_TRACE_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
POLL = 1
"""Seconds between Triton's checks for models to reload."""


@dataclass(frozen=True)
class Instance:
    """The resources of one running server."""

    ports: Ports
    scratch: Path
    """The working directory, removed when the server ends."""
    name: str
    """The server's id, with which the names of its shared-memory segments begin."""


@dataclass(frozen=True)
class Launch:
    """A command line, with the means to end what it starts."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    kind: str
    last_resort: tuple[str, ...] = ()
    """A command that removes what outlives the killed process."""
    notes: tuple[str, ...] = ()
    """What the operator has to know of this server."""


def triton_args(settings: ServerSettings, instance: Instance, triton: Release) -> tuple[str, ...]:
    """Return the arguments that all runtimes have in common, for this Triton."""
    ports = instance.ports
    args = [
        f"--id={instance.name}",
        *addresses(triton, ports.host),
        f"--http-port={ports.http}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={max(1, math.ceil(settings.grace))}",
        f"--backend-config=python,shm-region-prefix-name={instance.name}",
    ]
    if settings.renewable:
        # Triton polls a folder that only this user can write to.
        args += ["--model-control-mode=poll", f"--repository-poll-secs={POLL}"]
    collector = settings.otlp_endpoint
    more = (*(trace_arguments(collector) if collector else ()), *settings.extra_args)
    if triton is not UNKNOWN and (refused := triton.refused(more)):
        raise UsageError(
            f"Triton {triton.server} ({triton.container}) has no --{refused[0]}",
            hint="leave it out, or serve with a newer one",
        )
    return (*args, *closed(triton), *more)


def openness(settings: ServerSettings, triton: Release) -> tuple[str, ...]:
    """Return a note for a Triton whose interfaces stay open; raise if others are to reach it."""
    if triton.closes:
        return ()
    which = "a Triton of unknown version" if triton is UNKNOWN else f"Triton {triton.server}"
    if not settings.host.startswith("127."):
        raise ServerError(
            f"{which} lets whoever reaches it change it, so it listens only on {LOOPBACK}",
            hint="use a container of 24.07 or later, or put the gateway in front of it",
        )
    return (f"every user of this machine can change {which}: 24.07 is the first to be closed",)


def link_models(settings: ServerSettings, scratch: Path) -> Path:
    """Link the models into a folder in ``scratch``, and return it.

    The path of the scratch folder is safe for what Triton does with it (workarounds.UNQUOTED). If
    the settings name models, the folder contains only those.
    """
    repository = settings.repository.resolve()
    folder = scratch / "models"
    if settings.renewable:
        folder.mkdir()
        for name in settings.names():
            link_model(repository / name, folder / name, settings.texts.get(name))
    elif settings.models or settings.texts:
        folder.mkdir()
        for name in settings.names():
            if name in settings.texts:
                link_model(repository / name, folder / name, settings.texts[name])
            else:
                (folder / name).symlink_to(repository / name)
    else:
        folder.symlink_to(repository)
    return folder


FAR_FUTURE = 2**31 - 2**24
"""In 2037: no file of a model is newer, and every file system can store it."""


def link_model(model: Path, links: Path, texts: tuple[str, str] | None = None) -> None:
    """Link a model for a Triton that polls for changes, or make that Triton reload it.

    ``texts`` are its tensors for the text in and out, which clients then read from its
    configuration; the model's own file stays as it is.

    A model that is new appears with all its files at once.

    For Triton, a version has changed when the newest file in its folder has another time. So each
    version gets a file that is newer than all others will ever be: Triton notices partial or
    complete writes to the model's folder only when that file's time is changed here.
    """
    if not links.exists():
        new = links.parent.with_name(f"{links.name}.new")
        _link(model, new, texts)
        new.rename(links)
    else:
        _link(model, links, texts)


def unlink_model(links: Path) -> None:
    """Make a Triton that polls for changes unload a model."""
    if links.exists():
        # Moved away as a whole, so that Triton sees all of it or nothing.
        links.rename(aside := links.parent.with_name(f"{links.name}.dropped"))
        shutil.rmtree(aside)


def _link(model: Path, links: Path, texts: tuple[str, str] | None) -> None:
    versions = {path.name for path in model.iterdir() if path.is_dir() and path.name.isdecimal()}
    for folder, skipped in [*((name, set[str]()) for name in sorted(versions)), ("", versions)]:
        (links / folder).mkdir(parents=True, exist_ok=True)
        targets = {p.name: p for p in (model / folder).iterdir() if p.name not in skipped}
        for link in (links / folder).iterdir():
            if link.is_symlink() and link.name not in targets:
                link.unlink()
        for name, path in targets.items():
            if name == "config.pbtxt":
                _write_config(path, links, texts)
            elif not (links / folder / name).is_symlink():
                (links / folder / name).symlink_to(path)
    # Some need none but what Triton finds out itself.
    if texts and not (model / "config.pbtxt").exists():
        _write_config(None, links, texts)
    for name in versions:
        mark = links / name / RENEWED
        changed = int(mark.stat().st_mtime) + 1 if mark.exists() else FAR_FUTURE
        mark.touch()
        os.utime(mark, (changed, changed))


def _write_config(own: Path | None, links: Path, texts: tuple[str, str] | None) -> None:
    """Write a model's own configuration, with the texts that are declared of it."""
    new = links / ".config.pbtxt"
    if own is None:
        new.write_bytes(b"")
    else:
        shutil.copyfile(own, new)
    if texts:
        with new.open("a", encoding="utf-8") as file:
            file.writelines(f"\n{line}" for line in declared_texts(texts))
    new.replace(links / "config.pbtxt")


def launch_scripts(settings: ServerSettings) -> list[str]:
    """Return the models to load whose engines run in several processes, which they start."""
    models = settings.opened.models
    return [name for name in settings.names() if name in models and models[name].has_launch_script]


def server_command(
    settings: ServerSettings, server: str, arguments: tuple[str, ...], *, repository: str
) -> tuple[str, ...]:
    """Return the command that starts the server, through a model's launch script if it has one.

    An engine that runs in several processes needs a server, or a worker, for each of them. The
    script's arguments are the repository and the other arguments of the server.
    """
    scripts = launch_scripts(settings)
    if len(scripts) > 1:
        raise ServerError(
            f"{' and '.join(scripts)} each start a server of several processes",
            hint=f"serve one of them: --model {scripts[0]}",
        )
    engine = scripts[0] if scripts else ""
    return (*container.start(repository, engine=engine, server=server), *arguments)


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, adapted to a server in another working directory."""
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        parts = env["PYTHONPATH"].split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in parts)
    return env


def environment_of_triton() -> dict[str, str]:
    """Return the inherited environment, with trace headers as Triton expects them.

    See workarounds.ENCODED_HEADERS.
    """
    env = inherited_environment()
    headers = env.get(_TRACE_HEADERS)
    if headers and "%2c" not in headers.lower():
        env[_TRACE_HEADERS] = unquote(headers)
    return env


# An installed tritonserver, as in NVIDIA's containers.

_DEFAULT_BINARY = Path("/opt/tritonserver/bin/tritonserver")


def find_binary() -> Path:
    """Return the server on PATH, else the one in NVIDIA's default location, or raise."""
    server = shutil.which("tritonserver") or shutil.which(_DEFAULT_BINARY)
    if server is None:
        raise ServerError(
            f"no tritonserver on PATH or in {_DEFAULT_BINARY.parent}",
            hint="use --runtime embedded or --runtime docker",
        )
    return Path(server).absolute()


def prepare_binary(settings: ServerSettings, instance: Instance) -> Launch:
    server = find_binary()
    env = {**environment_of_triton(), **settings.env}
    # A script calls the server by its name.
    env["PATH"] = os.pathsep.join([str(server.parent), env.get("PATH", os.defpath)])
    repository = str(link_models(settings, instance.scratch))
    triton = _release_of(server)
    notes = openness(settings, triton)
    arguments = triton_args(settings, instance, triton)
    command = server_command(settings, str(server), arguments, repository=repository)
    return Launch(argv=command, env=env, kind="local", notes=notes)


_HELP_TIMEOUT = 60.0


def _release_of(server: Path) -> Release:
    """Return which Triton this is, from the file beside it, else from the options in its help."""
    with suppress(OSError, ValueError, IndexError):
        version = (server.resolve().parents[1] / "TRITON_VERSION").read_text(encoding="ascii")
        return release_of_server(version)
    with suppress(OSError, subprocess.TimeoutExpired):
        # It prints its help as an error.
        printed = subprocess.run(
            [server, "--help"], capture_output=True, encoding="utf-8", errors="replace",
            timeout=_HELP_TIMEOUT, check=False,
        )  # fmt: skip
        return release_from_help(printed.stdout + printed.stderr)
    return UNKNOWN


# A container, started through the docker command.

_SELECTED = "/tmp/selected"
"""Where a container has links to models whose configuration is completed."""
# Inside, the server listens on every interface of the container; only --publish exposes its ports.
_INSIDE = Ports(
    "0.0.0.0",  # noqa: S104
    http=container.HTTP_PORT,
    grpc=container.GRPC_PORT,
    metrics=container.METRICS_PORT,
)
_VARIABLES = "{{range .Config.Env}}{{println .}}{{end}}"
# Passed by name: Docker reads the values from its own environment, so that a token never appears
# on a command line, where every user of the machine can read it.
_PASSED_ON = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", _TRACE_HEADERS)


def find_docker() -> Path:
    """Return the ``docker`` command; raise if it is missing or its daemon does not answer."""
    command = shutil.which("docker")
    if command is None:
        raise ServerError("no docker command", hint="install Docker, or use --runtime embedded")
    if not _ask_docker(command, "version", "--format", "{{.Server.Version}}"):
        raise ServerError(
            "Docker is installed, but its daemon does not answer",
            hint="start it (and allow this user to use it), or use --runtime embedded",
        )
    return Path(command)


def prepare_docker(settings: ServerSettings, instance: Instance) -> Launch:
    command = str(find_docker())
    if not _ask_docker(command, "image", "inspect", "--format", "{{.Id}}", settings.image):
        dockerfiles = [model.folder / DOCKERFILE for model in settings.opened]
        matches = [
            path
            for path in dockerfiles
            if path.is_file() and image_of(path.parent.name) == settings.image
        ]
        dockerfile = f" -f {matches[0]}" if matches else ""
        raise ServerError(
            f"there is no image {settings.image} here",
            hint=f"docker build -t {settings.image}{dockerfile} {settings.repository}",
        )
    gpus = settings.gpus
    if gpus is None:
        gpus = "nvidia" in _ask_docker(command, "info", "--format", "{{json .Runtimes}}")
    variables = _ask_docker(command, "image", "inspect", "--format", _VARIABLES, settings.image)
    version = re.search(r"^TRITON_SERVER_VERSION=(.*)", variables, re.MULTILINE)
    triton = release_of_server(version[1]) if version else UNKNOWN
    return Launch(
        argv=(command, *docker_arguments(settings, instance, triton, gpus=gpus)),
        env=environment_of_triton(),
        kind="container",
        # Killing the command leaves the container running.
        last_resort=(command, "rm", "--force", instance.name),
        notes=openness(settings, triton),
    )


def docker_arguments(
    settings: ServerSettings, instance: Instance, triton: Release, *, gpus: bool
) -> tuple[str, ...]:
    """Return the arguments of ``docker``, including those of the server inside."""
    outside, inside = instance.ports, _INSIDE
    network = [
        f"--publish={outside.host}:{outside.http}:{inside.http}",
        f"--publish={outside.host}:{outside.grpc}:{inside.grpc}",
        f"--publish={outside.host}:{outside.metrics}:{inside.metrics}",
    ]
    if not triton.closes:
        # Other containers can reach what a container publishes, but not the machine's loopback.
        network, inside = ["--network=host"], outside
    repository = settings.repository.resolve()
    if settings.models:
        mounts = [_mount(repository / name, f"{MODELS}/{name}") for name in settings.models]
    else:
        mounts = [_mount(repository, MODELS)]
    mounts += [_mount(path, str(path)) for path in settings.mounts]
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    if cache.is_dir():
        mounts.append(_mount(cache.absolute(), HF_HOME, "rw"))
    return (
        "run",
        "--rm",
        f"--name={instance.name}",
        *network,
        *mounts,
        *(f"--env={variable}" for variable in _PASSED_ON if variable in os.environ),
        *(f"--env={variable}={value}" for variable, value in settings.env.items()),
        # The Python backend moves tensors through shared memory; Docker's default is 64 MiB.
        "--shm-size=1g",
        *(f"--ulimit={name}={value}" for name, value in ULIMITS.items()),
        *(("--gpus=all",) if gpus else ()),
        settings.image,
        *_command_inside(settings, triton_args(settings, replace(instance, ports=inside), triton)),
    )


def _command_inside(settings: ServerSettings, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the server's command in a container, where links are made if models need them."""
    if not settings.texts:
        return server_command(settings, "tritonserver", arguments, repository=MODELS)
    command = server_command(settings, "tritonserver", arguments, repository=_SELECTED)
    links = container.select(settings.names(), _SELECTED, MODELS, settings.texts)
    return ("sh", "-c", f"{links} && exec {shlex.join(command)}")


def _mount(source: Path, target: str, mode: str = "readonly") -> str:
    # Docker parses the fields as a line of CSV.
    fields = ["type=bind", f"source={source}", f"target={target}"]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields if mode == "rw" else [*fields, mode])
    return f"--mount={line.getvalue()}"


def _ask_docker(command: str, *arguments: str) -> str:
    try:
        result = subprocess.run(
            [command, *arguments],
            capture_output=True, encoding="utf-8", errors="replace", timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
