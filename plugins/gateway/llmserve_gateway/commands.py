"""``llmserve gateway`` and ``llmserve key``."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from llmserve.runtime.contract import CLASSES
from llmserve_gateway.turns import WEIGHTS

FILE = click.Path(path_type=Path, dir_okay=False)
READABLE = click.Path(path_type=Path, dir_okay=False, exists=True, readable=True)
PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(1)
WEIGHT = click.IntRange(WEIGHTS[0], WEIGHTS[-1])
CLASS = click.IntRange(CLASSES[0], CLASSES[-1])
KEYS = Path("llmserve-keys.json")
# With the event engine of newer grpcio versions, each message of a stream passes through more
# threads and takes more processor time. gRPC reads this when it is imported.
GRPC = {"GRPC_EXPERIMENTS": "-event_engine_client"}


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    envvar="LLMSERVE_URL",
    help="Triton's gRPC address; repeat for several that serve the same models.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=PORT, default=8080, show_default=True, help="0 for a free port.")
@click.option("--model", "models", multiple=True, help="Offer only this model; repeatable.")
@click.option("--keys", type=FILE, help="File of API keys; without it, only local clients.")
@click.option("--no-auth", is_flag=True, help="Serve without keys, on any address.")
@click.option(
    "--max-requests", type=COUNT, default=256, show_default=True, help="Concurrent requests."
)
@click.option(
    "--max-queue",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Requests that may wait for a slot.",
)
@click.option(
    "--max-queued-tokens",
    type=COUNT,
    default=1_000_000,
    show_default=True,
    help="Tokens in the prompts of all requests to one model.",
)
@click.option(
    "--batches",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="LLMSERVE_BATCHES",
    metavar="FOLDER",
    help="Accept files and batches of requests, and keep them in this folder.",
)
@click.option(
    "--responses",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="LLMSERVE_RESPONSES",
    metavar="FOLDER",
    help="Keep responses in this folder, so that requests may go on from them.",
)
@click.option(
    "--batch-requests",
    type=COUNT,
    default=32,
    show_default=True,
    envvar="LLMSERVE_BATCH_REQUESTS",
    help="Concurrent requests of batches while there are no others.",
)
@click.option(
    "--batch-beside",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    envvar="LLMSERVE_BATCH_BESIDE",
    help="Concurrent requests of batches beside others.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a request may take.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for running requests to end on shutdown.",
)
@click.option(
    "--triton-metrics",
    metavar="URL",
    multiple=True,
    help="Triton's metrics, to serve at /metrics/triton; without --url port 8002 of this machine. "
    "Repeat for each --url.",
)
@click.option("--open-metrics", is_flag=True, help="Serve metrics without a key.")
@click.option(
    "--inspect", is_flag=True, help="Show the last requests and their prompts to operators."
)
@click.option("--supervisor", type=FILE, hidden=True, help="Control socket of `serve`.")
@click.option("--on-demand", is_flag=True, hidden=True, help="Whether it loads on demand.")
@click.option(
    "--adapter-folder",
    type=click.Path(path_type=Path, file_okay=False),
    hidden=True,
    help="Folder of the adapters that requests may have added; `serve` knows the models' folder.",
)
@click.option(
    "--allow-image-host",
    "image_hosts",
    multiple=True,
    envvar="LLMSERVE_ALLOW_IMAGE_HOST",
    metavar="HOST",
    help="Open addresses of images at this host for users: a name for https, or http://NAME; "
    "repeatable.",
)
@click.option(
    "--warm-scope",
    type=click.Choice(["", "key", "all"]),
    default="",
    hidden=True,
    help="Whose prompts a request finds what was computed of: those of its key, or of all.",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME=MODEL",
    help="Answer requests for the model NAME, as another server called it, by MODEL; repeatable.",
)
@click.option(
    "--shadow",
    "shadows",
    multiple=True,
    metavar="NAME=NEW[:SHARE]",
    help="Ask the model NEW what users ask NAME as well, of 10% of requests, and compare.",
)
@click.option(
    "--canary",
    "canaries",
    multiple=True,
    metavar="NAME=NEW[:SHARE]",
    help="Have the model NEW answer a share of NAME's users, 5%, then all if it is as good.",
)
@click.option(
    "--release-tolerance",
    "tolerances",
    multiple=True,
    metavar="MEASURE=VALUE",
    help="How much more often NEW may fail, as errors=1%; off, or logits=2; repeatable.",
)
@click.option(
    "--keep-texts",
    type=click.FloatRange(0, min_open=True),
    metavar="HOURS",
    help="Keep texts of ten compared pairs for operators to see, for so long.",
)
@click.option(
    "--release-file",
    type=FILE,
    help="Keep what is known of releases here, so that they go on after a restart.",
)
@click.option(
    "--certify-share",
    type=click.FloatRange(0, 1),
    hidden=True,
    help="Which share of answers is handed to `serve`, to be judged by their models.",
)
@click.option(
    "--tool-parser",
    "tool_parsers",
    multiple=True,
    envvar="LLMSERVE_TOOL_PARSER",
    metavar="[MODEL=]NAME",
    help="Tool call parser, instead of the one for the chat template; repeatable.",
)
@click.option(
    "--tool-prompt",
    "tool_prompt",
    type=READABLE,
    envvar="LLMSERVE_TOOL_PROMPT",
    help="File with the text that explains tools to models whose chat template does not; "
    "{tools} stands for their list.",
)
@click.option(
    "--truncate",
    type=click.Choice(["ranking", "all", "none"]),
    default="ranking",
    show_default=True,
    envvar="LLMSERVE_TRUNCATE",
    help="Cut texts that are too long for rerankers, or for embedders too, unless a request says "
    "what it wants.",
)
@click.option(
    "--otlp-endpoint",
    "collector",
    metavar="URL",
    default="",
    help="Collector to send traces to (OTLP over HTTP).",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    envvar="LLMSERVE_ALLOWED_HOST",
    metavar="NAME",
    help="Answer for this host as well, besides localhost; repeatable, * for any.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    envvar="LLMSERVE_CORS_ORIGIN",
    help="Allow pages of this origin; repeatable.",
)
@click.option("--tls-cert", type=READABLE, help="Certificate (PEM), for https.")
@click.option("--tls-key", type=READABLE, help="Private key of the certificate (PEM).")
def gateway(
    urls: tuple[str, ...],
    triton_metrics: tuple[str, ...],
    tool_prompt: Path | None,
    **options: Any,
) -> None:
    """Serve the OpenAI API in front of a running Triton.

    \b
    llmserve gateway
    llmserve gateway --url triton.example:8001 --host 0.0.0.0 --keys keys.json
    llmserve gateway --url one.example:8001 --url another.example:8001
    """
    os.environ.update({**GRPC, **os.environ})
    from dataclasses import fields

    from llmserve.client import parse_url
    from llmserve.plugin import Address, UsageError
    from llmserve_gateway.admission import Limits
    from llmserve_gateway.gateway import Settings
    from llmserve_gateway.model_names import read_aliases
    from llmserve_gateway.releases.release import read_plans, read_tolerances
    from llmserve_gateway.response_stores import named_database
    from llmserve_gateway.serving import Listening, run

    for address in urls:
        parse_url(address)
    if not triton_metrics and not urls:
        triton_metrics = ("http://127.0.0.1:8002/metrics",)
    addresses = [*dict.fromkeys(urls)] or ["127.0.0.1:8001"]
    if triton_metrics[len(addresses) :]:
        raise UsageError("more --triton-metrics than --url", hint="give one for each --url")
    pairs = zip_longest(addresses, triton_metrics, fillvalue="")
    limit_names = [field.name for field in fields(Limits)]
    limits = Limits(**{name: options.pop(name) for name in limit_names})
    listening_names = ("host", "port", "grace", "no_auth", "tls_cert", "tls_key")
    listening = Listening(**{name: options.pop(name) for name in listening_names})
    settings = Settings(
        tuple(Address(url, metrics=metrics) for url, metrics in pairs),
        limits,
        tool_prompt=read_prompt(tool_prompt) if tool_prompt else "",
        aliases=read_aliases(options.pop("aliases")),
        releases=tuple(read_plans(options.pop("shadows"), options.pop("canaries"))),
        tolerances=read_tolerances(options.pop("tolerances")),
        database=named_database(options["responses"]),
        **options,
    )

    def say_where(url: str) -> None:
        click.echo(f"  openai   {url}", err=True)
        for address in silent(addresses) if settings.supervisor is None else ():
            click.echo(f"llmserve: note: no Triton answers at {address} yet", err=True)

    run(settings, listening, say_where)


def silent(addresses: Iterable[str]) -> list[str]:
    """Return the addresses at which nothing listens now."""
    from llmserve.client import parse_url

    found = []
    for address in addresses:
        place = parse_url(address)
        try:
            socket.create_connection((place.host.strip("[]"), place.port), timeout=1).close()
        except OSError:
            found.append(address)
    return found


def read_prompt(path: Path) -> str:
    """Read the text that explains tools to a model."""
    from llmserve.client import TOOLS_PLACE
    from llmserve.errors import UsageError

    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tool-prompt {path} cannot be read: {error}") from None
    if TOOLS_PLACE not in text:
        hint = f"write {TOOLS_PLACE} where the functions are to be listed"
        raise UsageError(f"--tool-prompt {path} does not show the tools", hint=hint)
    return text


@click.group()
def key() -> None:
    """Create, list, change and revoke API keys for the gateway.

    A gateway that runs with --keys notices each change at its next request.
    """


def rate(value: str) -> int | str:
    """Return a rate per minute, or the word that removes one."""
    return value if value == _NO_RATE else int(COUNT(value))


_NO_RATE = "none"
_WEIGHT_HELP = "Its share of its class, beside the others' weights."
_CLASS_HELP = "The class of its requests: lower numbers go first."
_NAME = click.argument("name")
_KEY_FILE = click.option("--file", type=FILE, default=KEYS, show_default=True, help="Key file.")
_MODELS = click.option(
    "--model", "models", multiple=True, help="Allow only this model; repeatable."
)


@key.command()
@_NAME
@_KEY_FILE
@_MODELS
@click.option("--requests-per-minute", type=COUNT, help="Rate limit.")
@click.option("--tokens-per-minute", type=COUNT, help="Rate limit.")
@click.option("--all-metrics", is_flag=True, help="Show it the metrics of all models.")
@click.option("--operator", is_flag=True, help="Let it load and unload models.")
@click.option("--adapters", is_flag=True, help="Let it add and remove adapters of its models.")
@click.option("--stateless", is_flag=True, help="Keep none of its responses.")
@click.option("--weight", type=WEIGHT, default=1, show_default=True, help=_WEIGHT_HELP)
@click.option("--priority", type=CLASS, default=0, show_default=True, help=_CLASS_HELP)
@click.option("--any-priority", is_flag=True, help="Let its requests ask for a class above.")
@click.option(
    "--from-env",
    "variable",
    metavar="VARIABLE",
    help="Take the key that this variable has, which clients have already, and print none.",
)
def new(
    name: str, file: Path, models: tuple[str, ...], variable: str | None, **limits: Any
) -> None:
    """Create a key and print it; its hash is added to the file.

    The key is shown this once.

    \b
    llmserve key new alice --file keys.json
    llmserve serve --keys keys.json
    """
    from llmserve_gateway.keys import new_key, take_key

    if variable is None:
        click.echo(new_key(file, name, models=list(models), **limits))
    else:
        take_key(file, name, _key_of(variable), models=list(models), **limits)
    click.echo(f"its hash is in {file}, which --keys reads", err=True)


def _key_of(variable: str) -> str:
    """Return the key that a variable of the environment has."""
    from llmserve.errors import UsageError

    if not (given := os.environ.get(variable, "")):
        raise UsageError(f"{variable} is not set", hint=f"export {variable} first")
    return given


@key.command(name="list")
@_KEY_FILE
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def list_(file: Path, as_json: bool) -> None:
    """List the keys of a file by their names, with their models and limits.

    Neither the keys, which are nowhere, nor their hashes are shown.
    """
    from llmserve_gateway.keys import read_keys

    keys = [{k: v for k, v in vars(each).items() if k != "sha256"} for each in read_keys(file)]
    if as_json:
        click.echo(json.dumps(keys))
        return
    rows: list[tuple[str, ...]] = [
        ("NAME", "MODELS", "REQUESTS/MIN", "TOKENS/MIN", "WEIGHT", "CLASS", "ALSO")
    ]
    for each in keys:
        may = ("all_metrics", "operator", "adapters", "stateless", "any_priority")
        also = [word for word in may if each[word]]
        rates = [each["requests_per_minute"], each["tokens_per_minute"]]
        rows.append(
            (
                _shown(each["name"]),
                _shown(", ".join(each["models"])) or "all",
                *(str(rate or "-") for rate in rates),
                str(each["weight"]),
                str(each["priority"]),
                ", ".join(also).replace("_", "-") or "-",
            )
        )
    _print_table(rows)


@key.command()
@click.argument("name", required=False)
@_KEY_FILE
@click.option("--days", type=COUNT, default=7, show_default=True, help="How many days to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def usage(name: str | None, file: Path, days: int, as_json: bool) -> None:
    """Show what each key has used on each day, or one key alone.

    A gateway writes that once a minute, and when it ends. Days are those of UTC.

    \b
    llmserve key usage --file keys.json
    llmserve key usage alice --days 30 --json --file keys.json
    """
    from llmserve_gateway.key_usage import read_usage, usage_rows

    found = usage_rows(read_usage(file), days, name)
    if as_json:
        click.echo(json.dumps(found))
    elif found:
        head = ["DAY", "NAME", "REQUESTS", "PROMPT TOKENS", "ANSWER TOKENS"]
        _print_table([head, *([_shown(str(value)) for value in row.values()] for row in found)])
    else:
        click.echo(f"nothing is known to be used by the keys of {file}", err=True)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _shown(text: str) -> str:
    """Return a text of the file without what a terminal would obey."""
    return text if text.isprintable() else ascii(text)


@key.command()
@_NAME
@_KEY_FILE
def revoke(name: str, file: Path) -> None:
    """Take a key out of the file: whoever has it is refused from the next request on.

    \b
    llmserve key revoke alice --file keys.json
    """
    from llmserve_gateway.keys import revoke_key

    revoke_key(file, name)
    click.echo(f"{_shown(name)} is no more in {file}", err=True)


@key.command(name="set")
@_NAME
@_KEY_FILE
@click.option("--name", "new_name", help="Another name.")
@_MODELS
@click.option("--all-models", is_flag=True, help="Allow all models.")
@click.option("--requests-per-minute", type=rate, help="Rate limit; none removes it.")
@click.option("--tokens-per-minute", type=rate, help="Rate limit; none removes it.")
@click.option("--all-metrics/--own-metrics", default=None, help="Metrics of all models, or not.")
@click.option("--operator/--no-operator", default=None, help="Let it load and unload models.")
@click.option(
    "--adapters/--no-adapters", default=None, help="Let it add and remove adapters of its models."
)
@click.option("--stateless/--stateful", default=None, help="Keep none of its responses, or some.")
@click.option("--weight", type=WEIGHT, help=_WEIGHT_HELP)
@click.option("--priority", type=CLASS, help=_CLASS_HELP)
@click.option(
    "--any-priority/--own-priority",
    default=None,
    help="Let its requests ask for a class above, or not.",
)
def set_(
    name: str,
    file: Path,
    new_name: str | None,
    models: tuple[str, ...],
    all_models: bool,
    **others: Any,
) -> None:
    """Change what a key may do; the key itself and what is not named stay.

    \b
    llmserve key set alice --requests-per-minute 600 --file keys.json
    llmserve key set alice --model demo --model other --tokens-per-minute none
    """
    from llmserve.errors import UsageError
    from llmserve_gateway.keys import change_key

    if models and all_models:
        hint = "give the models, or --all-models"
        raise UsageError("--model and --all-models contradict each other", hint=hint)
    changes = {
        field: None if value == _NO_RATE else value
        for field, value in others.items()
        if value is not None
    }
    changes |= {"name": new_name} if new_name is not None else {}
    changes |= {"models": list(models)} if models or all_models else {}
    if not changes:
        raise UsageError("nothing to change", hint="llmserve key set --help lists what there is")
    change_key(file, name, **changes)
    click.echo(f"{_shown(new_name or name)} is changed in {file}", err=True)
