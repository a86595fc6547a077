"""Containers of Triton: images, paths, commands, and what each release accepts.

The table of options was read from NVIDIA's sources: ``src/command_line_parser.cc`` and
``TRITON_VERSION`` of the branches r23.10 to r26.08 of triton-inference-server/server, and the
version of gRPC and the copy of libevhtp that the same branches of
triton-inference-server/third_party build it with. No release has taken an option back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from llmserve.contract.tensors import declared_texts

__all__ = [
    "GRPC_PORT",
    "HF_HOME",
    "HTTP_PORT",
    "IMAGE",
    "LOOPBACK",
    "METRICS_PORT",
    "MODELS",
    "NEWEST",
    "SERVERS",
    "TUNING",
    "ULIMITS",
    "UNKNOWN",
    "Release",
    "addresses",
    "closed",
    "release",
    "release_in",
    "select",
    "start",
]
"""What plugins may use."""

SERVERS = {
    "23.10": "2.39.0", "23.11": "2.40.0", "23.12": "2.41.0", "24.01": "2.42.0", "24.02": "2.43.0",
    "24.03": "2.44.0", "24.04": "2.45.0", "24.05": "2.46.0", "24.06": "2.47.0", "24.07": "2.48.0",
    "24.08": "2.49.0", "24.09": "2.50.0", "24.10": "2.51.0", "24.11": "2.52.0", "24.12": "2.53.0",
    "25.01": "2.54.0", "25.02": "2.55.0", "25.03": "2.56.0", "25.04": "2.57.0", "25.05": "2.58.0",
    "25.06": "2.59.0", "25.07": "2.59.1", "25.08": "2.60.0", "25.09": "2.61.0", "25.10": "2.62.0",
    "25.11": "2.63.0", "25.12": "2.64.0", "26.01": "2.65.0", "26.02": "2.66.0", "26.03": "2.67.0",
    "26.04": "2.68.0", "26.05": "2.69.0", "26.06": "2.70.0", "26.07": "2.71.0", "26.08": "2.72.0",
}  # fmt: skip
"""The version of the server in each container."""

NEWEST = max(SERVERS)
"""The newest release whose sources were read."""

_OF_ALL = """
allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker
allow-vertex-ai backend-config backend-directory buffer-manager-thread-count cache-config
cache-directory cuda-memory-pool-byte-size disable-auto-complete-config exit-on-error
exit-timeout-secs grpc-address grpc-header-forward-pattern grpc-http2-max-ping-strikes
grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data
grpc-infer-allocation-pool-size grpc-infer-response-compression-level
grpc-keepalive-permit-without-calls grpc-keepalive-time grpc-keepalive-timeout grpc-port
grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl
grpc-use-ssl-mutual help host-policy http-address http-header-forward-pattern http-port
http-thread-count id load-model log-error log-file log-format log-info log-verbose
log-warning metrics-address metrics-config metrics-interval-ms metrics-port
min-supported-compute-capability model-control-mode model-load-gpu-limit
model-load-thread-count model-namespacing model-repository model-store
pinned-memory-pool-byte-size rate-limit rate-limit-resource repoagent-directory
repository-poll-secs response-cache-byte-size reuse-grpc-port reuse-http-port sagemaker-port
sagemaker-safe-port-range sagemaker-thread-count strict-model-config strict-readiness
trace-config trace-count trace-file trace-level trace-log-frequency trace-rate
vertex-ai-default-model vertex-ai-port vertex-ai-thread-count
"""

_SINCE = {
    "cuda-virtual-address-size": "23.11",
    "http-restricted-api": "23.11",
    "grpc-max-connection-age": "24.01",
    "grpc-max-connection-age-grace": "24.01",
    "model-load-retry-count": "24.01",
    "model-config-name": "24.05",
    "enable-peer-access": "24.06",
    "grpc-max-response-pool-size": "25.03",
    "grpc-infer-thread-count": "25.04",
    "http-max-input-size": "25.06",
    "allow-client-shm": "26.04",
}
"""The release in which each other option appeared."""

_PYTHONS = {"23.10": "3.10.12", "24.11": "3.12.3"}
_ENGINE_PYTHONS = {"23.10": "3.10.12", "24.12": "3.12.3"}
"""Python in the images from each release on, and in those with TensorRT-LLM, one release later.

From docs/introduction/compatibility.md of the server, and for what is older than that page from the
Ubuntu that ``build.py`` of the same branch is for.
"""
PYTHONS = frozenset({*_PYTHONS.values(), *_ENGINE_PYTHONS.values()})

LAST_RELEASES = {"3.10": {"onnxruntime": "1.23.2", "transformers": "5.20.2"}}
"""The last releases of packages for a Python that their later ones have left, by its minor version.

A model that was built with later ones gets these in an image with that Python.
"""

_TUNING = """
allow-cpu-metrics allow-gpu-metrics backend-config buffer-manager-thread-count cache-config
cuda-memory-pool-byte-size cuda-virtual-address-size disable-auto-complete-config
enable-peer-access grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size
grpc-infer-response-compression-level grpc-infer-thread-count
grpc-keepalive-permit-without-calls grpc-keepalive-time grpc-keepalive-timeout
grpc-max-connection-age grpc-max-connection-age-grace host-policy http-max-input-size
http-thread-count log-verbose metrics-config metrics-interval-ms
min-supported-compute-capability model-load-gpu-limit model-load-retry-count
model-load-thread-count pinned-memory-pool-byte-size rate-limit rate-limit-resource
response-cache-byte-size
"""
TUNING = frozenset(_TUNING.split())
"""The options of Triton that users may set beside ours: none opens, moves or names an interface,
a file or the models, and none is read by whoever starts it."""

_GRPC_CHECKS_NAMES = "24.07"
"""The first release with gRPC 1.54.3; the 1.48.0 of those before takes any bytes as a name."""


@dataclass(frozen=True)
class Release:
    """A release of Triton, or a Triton of which only that much is known.

    >>> release("24.10").server, release("23.10").closes, UNKNOWN.closes
    ('2.51.0', False, False)
    """

    container: str
    server: str
    options: frozenset[str]
    """The options that it surely accepts, without their dashes."""
    closes: bool
    """Whether its administrative interfaces can be closed to everyone who reaches its ports."""

    def refused(self, command: Collection[str]) -> list[str]:
        """Return the options of a command line that this release would not start with."""
        names = (word[2:].partition("=")[0] for word in command if word.startswith("--"))
        return [name for name in names if name not in self.options]


def release(container: str) -> Release:
    """Return a release by its container, such as 24.10; later ones accept what the newest does."""
    options = {*_OF_ALL.split(), *(name for name, since in _SINCE.items() if since <= container)}
    closes = container >= _GRPC_CHECKS_NAMES
    return Release(container, SERVERS.get(container, ""), frozenset(options), closes)


UNKNOWN = release(min(SERVERS))
"""A Triton of which nothing is known: it may be as old as any."""


def release_in(image: str) -> Release:
    """Return the release that the tag of an image names.

    >>> release_in("nvcr.io/nvidia/tritonserver:24.10-trtllm-python-py3").container
    '24.10'
    >>> release_in("example.com/mine:latest") is UNKNOWN
    True
    """
    tag = re.fullmatch(r"[^:]*(?::\d+/[^:]*)?:(\d\d\.\d\d)(?:[-@].*)?", image)
    return release(tag[1]) if tag and tag[1] >= UNKNOWN.container else UNKNOWN


def python_in(image: str | None) -> str:
    """Return the version of Python in an image; empty if it is not known.

    >>> python_in("nvcr.io/nvidia/tritonserver:24.11-trtllm-python-py3"), python_in(PLAIN)
    ('3.10.12', '3.12.3')
    """
    name = BASE_IMAGE if image == PLAIN else image or ""
    triton = release_in(name)
    if triton is UNKNOWN:
        return ""
    table = _ENGINE_PYTHONS if "-trtllm-" in name else _PYTHONS
    return table[max(since for since in table if since <= triton.container)]


def release_of_server(version: str) -> Release:
    """Return the release with this version of the server, or the last before it.

    >>> release_of_server("2.59.1").container, release_of_server("2.99.0").container
    ('25.07', '26.08')
    """
    number = _number(version)
    older = [name for name, server in SERVERS.items() if _number(server) <= number]
    return release(max(older)) if number and older else UNKNOWN


def release_from_help(text: str) -> Release:
    """Return the oldest release that can have printed this help: it may be a later one."""
    options = re.findall(r"^  --([a-z0-9-]+)", text, re.MULTILINE)
    return release(max((_SINCE.get(name, "") for name in options), default="") or min(SERVERS))


def _number(version: str) -> tuple[int, ...]:
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, parts.groups())) if parts else ()


# How interfaces are closed: Triton asks for a header with one value. Both are on its command line,
# which every user of the machine can read, and over gRPC a value can be any bytes. So the name is
# one that no request can have: in HTTP, a colon ends a name unless it is its first byte, and gRPC
# refuses a request that has one in a name.
LOCK = "llmserve:closed=always"
"""The header and its value that closed interfaces ask for."""

_CLOSED = "shared-memory,trace,logging"
"""Tracing and logging can be made to write files; through shared memory, versions before 25.07
could be made to run code. Loading models is not among them: Triton itself refuses it in the modes
in which we start it, and its clients may list its models."""

_UNREAD = 16384
"""The most responses that Triton keeps for a client that does not read them, of each request.

NVIDIA's docs/customization_guide/deploy.md asks for a bound where clients are not trusted (server
#8880); by default there is none. A model that has sent more waits for the client, so it is more
than most answers have.
"""

LOOPBACK = "127.0.0.1"


def closed(triton: Release) -> list[str]:
    """Return the options that close Triton's administrative interfaces, and bound what it keeps."""
    options = {
        "http-restricted-api": f"{_CLOSED}:{LOCK}",
        "grpc-restricted-protocol": f"{_CLOSED}:{LOCK}",
        "allow-client-shm": "false",
        "grpc-max-response-pool-size": str(_UNREAD),
    }
    return [f"--{name}={value}" for name, value in options.items() if name in triton.options]


def addresses(triton: Release, host: str = "") -> list[str]:
    """Return the options for the address to listen on: loopback where interfaces stay open."""
    if not triton.closes and not host.startswith("127."):
        host = LOOPBACK
    return [f"--{name}-address={host}" for name in ("http", "grpc", "metrics") if host]


# Images, and what ours have in them.

BASE_IMAGE = f"nvcr.io/nvidia/tritonserver:{NEWEST}-py3"
"""NVIDIA's release on which emitted Dockerfiles are based."""

PLAIN = ""
"""Denotes that image; None denotes one that is not known."""

IMAGE = "llmserve-triton"
"""The name of the image built from such a Dockerfile."""

DOCKERFILE = "Dockerfile"
LAUNCH_SCRIPT = "launch.sh"
"""A model's script that starts the server, for engines of several processes."""

MODELS = "/models"
HF_HOME = "/hf"
"""The paths of the repository and the hub's cache inside the container."""

HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002

ULIMITS = {"memlock": -1, "stack": 64 << 20}
"""The limits with which NVIDIA's pages start containers: engines pin memory that GPUs read."""


def image_of(model: str = "") -> str:
    """Return the name of the image of a repository, or of a model that has its own image."""
    # Docker accepts only lowercase letters and no repeated separators.
    suffix = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{IMAGE}-{suffix}" if suffix else IMAGE


def triton_of(image: str | None) -> Release:
    """Return the Triton in the image that a manifest names."""
    return UNKNOWN if image is None else release_in(image or BASE_IMAGE)


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


def base_of(dockerfile: str) -> str:
    """Return the image on which a Dockerfile's last stage is based.

    >>> base_of("ARG TAG=24.10-py3\\nFROM nvidia/triton:$TAG AS one\\nFROM one")
    'nvidia/triton:24.10-py3'
    """
    values: dict[str, str] = {}
    stages: dict[str, str] = {}
    base = ""
    for line in dockerfile.replace("\\\n", " ").splitlines():
        command, *words = line.split() or [""]
        words = [word for word in words if not word.startswith("--")]
        if command.upper() == "ARG" and not base:
            values |= {k: v.strip("\"'") for k, _, v in (word.partition("=") for word in words)}
        elif command.upper() == "FROM" and words:
            name = _filled(words[0], values)
            base = stages.get(name, name)
            if len(words) > 2 and words[1].upper() == "AS":
                stages[words[2]] = base
    return base


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: values.get(m[1] or m[2]) or m[3] or "", text)


def start(
    models: str, *, engine: str = "", repository: str = "", server: str = "tritonserver"
) -> list[str]:
    """Return the command that serves a folder of models, without the server's other arguments.

    An ``engine`` of several processes is a model of the ``repository``, by default of that folder:
    its script starts a server, or a worker, for each of them.
    """
    if engine:
        return ["sh", f"{repository or models}/{engine}/{LAUNCH_SCRIPT}", models]
    return [server, f"--model-repository={models}"]


def select(
    models: Sequence[str],
    folder: str,
    repository: str = MODELS,
    texts: Mapping[str, tuple[str, str]] | None = None,
) -> str:
    """Return the shell command that links models of the container into a folder to serve.

    Triton could also be told their names, but only in the mode in which it loads models for
    whoever asks, and a model is code. Those with ``texts`` are linked file by file, with a copy of
    their configuration that names their tensors for the text in and out.
    """
    texts = texts or {}
    paths = [shlex.quote(f"{repository}/{name}") for name in models if name not in texts]
    steps = [f"mkdir -p {folder}"]
    steps += [f"ln -sf {' '.join(paths)} {folder}"] if paths else []
    for name in models:
        if name in texts:
            model, links = shlex.quote(f"{repository}/{name}"), shlex.quote(f"{folder}/{name}")
            declared = shlex.join(declared_texts(texts[name]))
            steps += [
                # Made anew, since a container that starts again has what it made before.
                f"rm -rf {links} && mkdir {links} && ln -s {model}/* {links}",
                f"rm -f {links}/config.pbtxt",
                # Some models need no configuration but what Triton finds out itself.
                f"{{ {{ [ ! -e {model}/config.pbtxt ] || cat {model}/config.pbtxt; }} "
                f"&& printf '\\n%s' {declared}; }} > {links}/config.pbtxt",
            ]
    return " && ".join(steps)
