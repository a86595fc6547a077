"""The options of ``llmserve serve``, each said once.

A field of :class:`ServeOptions` is an option: its name, its type and default, and the rest of its
row. From the rows are made the options of the command line with their help, the keys of
``llmserve.toml`` with their schema and their reference page, the defaults of a server's settings,
and what a frontend is started with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, get_args

Runtime = Literal["auto", "embedded", "binary", "docker"]
Kind = Literal["text", "path", "file", "folder", "whole", "number", "flag", "texts", "models"]


@dataclass(frozen=True)
class ServeOption:
    """A row: one option of ``serve``."""

    kind: Kind
    help: str
    default: Any = None
    flags: tuple[str, ...] = ()
    """What it is called on the command line; by default as its field, with hyphens."""
    unit: str = ""
    """What stands for its value in the help, if not its kind."""
    choices: tuple[str, ...] = ()
    low: float | None = None
    above: bool = False
    """Whether the value must be above ``low``."""
    table: Literal["serve", "gateway", ""] = "serve"
    """The part of ``llmserve.toml`` that has it; without one, it is for the command line alone."""
    key: str = ""
    """What it is called there; by default as its field."""
    key_help: str = ""
    """Its help there, if it is not that of the command line with keys instead of flags."""
    opens: bool = False
    """Whether it opens what is closed: a file that merely lies in a folder may not set it."""
    setting: bool = False
    """Whether the server's settings have a field of its name that takes it as it is."""
    place: str = ""
    """The field of a frontend's ``Place`` that takes it as it is."""
    name: str = ""


_P = ParamSpec("_P")


def _as_field(row: Callable[_P, ServeOption]) -> Callable[_P, Any]:
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        option = row(*args, **kwargs)
        return field(default=option.default, metadata={"row": option})

    return make


_option = _as_field(ServeOption)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of one ``serve``. Those that are not given have their defaults."""

    runtime: Runtime = _option(
        "text",
        "Triton to run: embedded (from PyPI), binary (on PATH), or docker (NVIDIA's container).",
        "auto", choices=get_args(Runtime), setting=True,
    )  # fmt: skip
    host: str = _option(
        "text", "Address to listen on; Triton's own ports stay on loopback without --open-triton.",
        "127.0.0.1",
    )  # fmt: skip
    open_triton: bool = _option(
        "flag", "Have Triton's own ports, which know no keys, listen on --host too.", False,
        opens=True,
    )  # fmt: skip
    http_port: int = _option(
        "whole", "0 for any free port.", 8000, setting=True,
        key_help="Triton's HTTP port; 0 for any free one.",
    )  # fmt: skip
    grpc_port: int = _option(
        "whole", "0 for any free port.", 8001, setting=True,
        key_help="Triton's gRPC port; 0 for any free one.",
    )  # fmt: skip
    metrics_port: int = _option(
        "whole", "0 for any free port.", 8002, setting=True,
        key_help="The port of Triton's metrics; 0 for any free one.",
    )  # fmt: skip
    models: tuple[str, ...] = _option(
        "models", "Load only this model (repeatable).", (), flags=("--model",), table=""
    )
    grace: float = _option(
        "number", "Seconds to wait for requests in flight at shutdown.", 30.0, low=0, setting=True,
        place="grace",
    )  # fmt: skip
    replicas: int = _option(
        "whole", "Number of Tritons on this machine, behind one frontend.", 1, low=1, setting=True
    )
    log_file: Path | None = _option(
        "path", "Log file of Triton; no link, pipe or device.", flags=("--log",), setting=True
    )
    frontend_names: tuple[str, ...] = _option(
        "texts",
        "Frontend to start, or none (repeatable; default: the OpenAI API, if it is installed).", (),
        flags=("--frontend",), table="gateway", key="frontends",
        key_help="The frontends to start, or none; by default the OpenAI API.",
    )  # fmt: skip
    frontend_host: str | None = _option(
        "text", "Address of the frontend (default: that of --host).", table="gateway", key="host",
        key_help="The address to listen on; by default that of serve.",
    )  # fmt: skip
    frontend_port: int | None = _option(
        "whole",
        "Port of the frontend, as of the OpenAI API (default: its own, 8080; 0 for a free one).",
        flags=("--port", "--frontend-port"), table="gateway", key="port",
    )  # fmt: skip
    keys: Path | None = _option(
        "file", "File with the API keys that the frontend accepts.", table="gateway", place="keys"
    )
    batches: Path | None = _option(
        "folder", "Folder in which the frontend keeps files and batches of requests.",
        table="gateway", place="batches",
    )  # fmt: skip
    responses: Path | None = _option(
        "folder", "Folder in which the frontend keeps responses that requests may go on from.",
        table="gateway", place="responses",
    )  # fmt: skip
    adapter_folder: Path | None = _option(
        "folder", "Folder from which requests may add adapters to models, and no others.",
        table="gateway", place="adapter_folder",
    )  # fmt: skip
    image_hosts: tuple[str, ...] = _option(
        "texts", "Open addresses of images at this host for users: a name for https, or "
        "http://NAME (repeatable).", (), flags=("--allow-image-host",), unit="HOST",
        table="gateway", key="allow_image_hosts", place="image_hosts",
        key_help="Hosts whose addresses of images are opened for users: a name for https, or "
        "http://NAME; none by default.",
    )  # fmt: skip
    aliases: tuple[str, ...] = _option(
        "texts", "Answer requests for the model NAME, as another server called it, by MODEL "
        "(repeatable).", (), flags=("--alias",), unit="NAME=MODEL", table="gateway",
        place="aliases",
        key_help="Names that requests may use for a model beside its own, each as NAME=MODEL.",
    )  # fmt: skip
    shadows: tuple[str, ...] = _option(
        "texts", "Ask the model NEW what users ask NAME as well, of 10% of requests, and compare "
        "(repeatable).", (), flags=("--shadow",), unit="NAME=NEW[:SHARE]", table="gateway",
        place="shadows",
    )  # fmt: skip
    canaries: tuple[str, ...] = _option(
        "texts", "Have the model NEW answer a share of NAME's users, 5%, then all if it is as "
        "good (repeatable).", (), flags=("--canary",), unit="NAME=NEW[:SHARE]", table="gateway",
        place="canaries",
    )  # fmt: skip
    release_tolerances: tuple[str, ...] = _option(
        "texts", "How much more often NEW may fail, as errors=1%; off, or logits=2 (repeatable).",
        (), flags=("--release-tolerance",), unit="MEASURE=VALUE", table="gateway",
        place="release_tolerances",
    )  # fmt: skip
    keep_texts: float | None = _option(
        "number", "Keep texts of ten compared pairs for operators to see, for so long.",
        unit="HOURS", low=0, above=True, table="gateway", place="keep_texts",
    )  # fmt: skip
    release_file: Path | None = _option(
        "file", "Keep what is known of releases here, so that they go on after a restart.",
        table="gateway", place="release_file",
    )  # fmt: skip
    no_auth: bool = _option(
        "flag", "Run the frontend without keys, on any address.", False, table="gateway",
        opens=True, place="open",
    )  # fmt: skip
    inspect: bool = _option(
        "flag", "Show the last requests and what models read of them on the page: on this machine, "
        "or to keys that may load models.", False, table="gateway", opens=True, place="inspect",
    )  # fmt: skip
    otlp_endpoint: str = _option(
        "text",
        "Send traces to this URL (OTLP over HTTP).",
        "",
        unit="URL",
        setting=True,
        place="collector",
    )
    certify: bool = _option(
        "flag", "Ask models again and again, while they are idle, what they answered at first.",
        False, setting=True,
    )  # fmt: skip
    certify_share: float | None = _option(
        "number", "With --certify: have models judge this share of their answers to users as well.",
        unit="SHARE", low=0, place="certify_share",
    )  # fmt: skip
    on_fault: str = _option(
        "text", "With --certify: run this command, or post to this URL, if answers are wrong.", "",
        unit="COMMAND|URL", opens=True, setting=True,
    )  # fmt: skip
    triton_flags: tuple[str, ...] = _option(
        "texts", "Option of Triton itself, such as log-verbose=1 (repeatable).", (),
        flags=("--triton-flag",), unit="NAME=VALUE", table="",
    )  # fmt: skip
    on_demand: bool = _option(
        "flag", "Load models when a request needs them.", False, setting=True, place="on_demand"
    )
    max_loaded: int | None = _option(
        "whole", "With --on-demand: how many models may be loaded at once.", low=1
    )
    memory: float | None = _option(
        "number", "With --on-demand: memory that all models may take (default: 90% of what is "
        "free, or no limit with --max-loaded).", unit="GB", low=0, above=True,
        key_help="With on_demand: how many GB of memory all models may take.",
    )  # fmt: skip
    unload_after: float | None = _option(
        "number", "With --on-demand: unload a model that was not used for so long.",
        unit="SECONDS", low=0, above=True,
        key_help="With on_demand: unload a model unused for so many seconds.",
    )  # fmt: skip
    pinned: tuple[str, ...] = _option(
        "models", "With --on-demand: load this model at the start, and keep it (repeatable).", (),
        flags=("--pin",), table="",
    )  # fmt: skip

    warm: float = _option(
        "number", "Keep what is computed of prompts on disk, where it outlives a restart: up to "
        "so many GB; 0 for nothing.", 0.0, unit="GB", low=0,
    )  # fmt: skip
    warm_scope: str = _option(
        "text", "With --warm: whose prompts a request finds, those of its API key or of all.",
        "key", choices=("key", "all"), place="warm_scope",
    )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Return the fields of the server's settings that take an option as it is."""
        return {row.name: getattr(self, row.name) for row in SERVE_OPTIONS.values() if row.setting}

    def place(self) -> dict[str, Any]:
        """Return the fields of a frontend's place that take an option as it is."""
        values = {row.place: getattr(self, row.name) for row in PLACED}
        if not self.warm:
            # In memory, all find each other's.
            values["warm_scope"] = ""
        return {
            name: value.absolute() if isinstance(value, Path) else value
            for name, value in values.items()
        }


def _named(row: ServeOption, name: str) -> ServeOption:
    flags = row.flags or (f"--{name.replace('_', '-')}",)
    words = row.help.split(" ")
    with_keys = " ".join(w[2:].replace("-", "_") if w.startswith("--") else w for w in words)
    return replace(
        row, name=name, flags=flags, key=row.key or name, key_help=row.key_help or with_keys
    )


SERVE_OPTIONS: Mapping[str, ServeOption] = {
    item.name: _named(item.metadata["row"], item.name) for item in fields(ServeOptions)
}
PLACED = tuple(row for row in SERVE_OPTIONS.values() if row.place)
"""The options that a frontend takes as they are."""


def keys_of(table: str) -> dict[str, ServeOption]:
    """Return the options that a part of ``llmserve.toml`` may set, by their keys."""
    return {row.key: row for row in SERVE_OPTIONS.values() if row.table == table}
