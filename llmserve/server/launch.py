"""A server that is ready to be started, whichever runtime it comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmserve.errors import ServerError
from llmserve.server.ports import Ports
from llmserve.server.settings import ServerSettings

KEY_HEADER = "llmserve-key"
SCRIPT = "launch.sh"


@dataclass(frozen=True)
class Own:
    """What belongs to one server alone."""

    ports: Ports
    scratch: Path
    """Its working directory, removed when it ends."""
    name: str
    """What it calls itself, and what the names of its shared-memory segments begin with."""
    key: str
    """What a request has to bring to load a model, or to change what is traced or logged."""


@dataclass(frozen=True)
class Launch:
    """A command line, and what is needed to end what it starts."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    kind: str
    last_resort: tuple[str, ...] = ()
    """A command that removes what killing the process cannot reach."""


def triton_args(settings: ServerSettings, own: Own) -> tuple[str, ...]:
    """Return the arguments that are the same for every runtime.

    What reads or writes beyond inference is behind the key. Tracing and logging can be made to
    write files; through shared memory, versions before 25.07 could be made to run code, and
    by loading a model every version can.
    """
    guarded = "shared-memory,trace,logging"
    args = [
        f"--id={own.name}",
        f"--http-address={own.ports.host}",
        f"--http-port={own.ports.http}",
        f"--grpc-address={own.ports.host}",
        f"--grpc-port={own.ports.grpc}",
        f"--metrics-address={own.ports.host}",
        f"--metrics-port={own.ports.metrics}",
        f"--backend-config=python,shm-region-prefix-name={own.name}",
    ]
    if settings.explicit or settings.models:
        guarded += ",model-repository"
        args += ["--model-control-mode=explicit"]
        args += [f"--load-model={name}" for name in settings.models]
    # Triton takes the key on its command line alone, where other users of this machine can read
    # it unless /proc hides processes from them; it is new with every start and opens no more
    # than what a Triton without restrictions leaves open to all.
    args += [
        f"--http-restricted-api={guarded}:{KEY_HEADER}={own.key}",
        f"--grpc-restricted-protocol={guarded}:{KEY_HEADER}={own.key}",
    ]
    return (*args, *settings.extra_args)


def server_command(
    settings: ServerSettings, server: str, arguments: tuple[str, ...], *, repository: str
) -> tuple[str, ...]:
    """Return the command that starts the server, by a model's own script where it brings one.

    An engine that runs in several processes needs a server, or a worker, for each of them. The
    script takes the repository and what else the server is to be told.
    """
    scripts = sorted(path.parent.name for path in settings.repository.glob(f"*/{SCRIPT}"))
    scripts = [name for name in scripts if not settings.models or name in settings.models]
    if not scripts:
        return (server, f"--model-repository={repository}", *arguments)
    if len(scripts) > 1:
        raise ServerError(
            f"{' and '.join(scripts)} each start a server of several processes",
            mend=f"serve one of them: --model {scripts[0]}",
        )
    return ("sh", f"{repository}/{scripts[0]}/{SCRIPT}", repository, *arguments)


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, fit for a server that works in another folder."""
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        parts = env["PYTHONPATH"].split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(str(Path(part).absolute()) for part in parts)
    return env
