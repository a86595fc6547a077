"""The Triton inside the ``nvidia-pytriton`` wheel: no container, no GPU needed."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import ConfigError, LLMServeError, PluginError, ServerError
from llmserve.server import stub_site
from llmserve.server.launch import (
    Instance,
    Launch,
    environment_of_triton,
    link_models,
    triton_args,
)
from llmserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmserve.roles import Backend

_LIBRARY = "libtriton_python.so"
BUNDLED = "nvidia_pytriton.libs"
_MEND = "pip install 'llmserve[embedded]' on Python 3.10 to 3.12, or use --runtime docker"


def find_embedded() -> Path:
    """Return the folder of the installed server, or raise with what is missing.

    Nothing of ``pytriton`` is imported: that takes a second and starts things of its own.
    """
    if sys.version_info >= (3, 13):
        raise ServerError(f"the embedded Triton does not run on Python {_python()}", mend=_MEND)
    try:
        distribution = metadata.distribution("nvidia-pytriton")
        numpy = metadata.version("numpy")
    except metadata.PackageNotFoundError as error:
        raise ServerError(f"{error.name} is not installed", mend=_MEND) from None
    if int(numpy.split(".")[0]) >= 2:
        raise ServerError(
            f"the embedded Triton needs numpy < 2 and this is {numpy}",
            mend="pip install 'numpy<2', or use --runtime docker",
        )
    home = Path(str(distribution.locate_file("pytriton/tritonserver")))
    if not (home / "bin" / "tritonserver").is_file():
        raise ServerError("this nvidia-pytriton brings no server (Linux x86-64 only)", mend=_MEND)
    return home


def _backends(
    settings: ServerSettings,
) -> tuple[tuple[Backend, ...], dict[str, LLMServeError]]:
    """Return the backends beside Triton's own: those given, else all that plugins register.

    Of one that two plugins have, what is wrong is returned by its name.
    """
    if settings.backends is not None:
        return settings.backends, {}
    from llmserve.registry import Registry
    from llmserve.roles import Backend

    registry = Registry.load()
    usable: list[Backend] = []
    clashes: dict[str, LLMServeError] = {}
    for name in sorted({backend.name for backend in registry.all(Backend)}):
        try:
            usable.append(registry.get(Backend, name))
        except PluginError as error:
            clashes[name] = error
    return tuple(usable), clashes


def missing_backends(settings: ServerSettings, models: Sequence[str]) -> list[LLMServeError]:
    """Return which of these models need a backend that is not there."""
    from llmserve.repository import config

    backends, clashes = _backends(settings)
    there = {backend.name: Path(backend.folder, "model.py") for backend in backends}
    problems: list[LLMServeError] = []
    for name in models:
        try:
            found = config.read(settings.repository / name)
        except (ConfigError, OSError):
            continue
        needed = config.backend_of(found)
        if needed in clashes:
            problems.append(clashes[needed])
        elif needed not in {"", "python", "ensemble", *there}:
            problems.append(
                ConfigError(
                    f"model {name!r} needs Triton's backend {needed!r}, which the embedded server "
                    "lacks",
                    mend="install a plugin that brings it, such as llmserve-standins, or use "
                    "--runtime docker",
                )
            )
        elif needed in there and not there[needed].is_file():
            problem = f"backend {needed!r}, which model {name!r} needs, has no {there[needed]}"
            problems.append(PluginError(problem, mend="tell its plugin's author"))
    return problems


def lay_out(home: Path, scratch: Path, added: Sequence[Backend]) -> tuple[Path, Path]:
    """Lay out the backends and libraries in ``scratch``; return both folders.

    The Python backend looks for its stub beside itself, and the wheel keeps one stub for each
    Python version elsewhere.
    """
    stub = home / "python_backend_stubs" / _python() / "triton_python_backend_stub"
    python = scratch / "backends" / "python"
    python.mkdir(parents=True)
    bundled = home / "backends" / "python"
    for file in (bundled / "triton_python_backend_utils.py", stub):
        (python / file.name).symlink_to(file)
    # A backend written in Python runs this library, and Triton refuses one that a link leads
    # out of the folder of backends. It is small.
    shutil.copyfile(bundled / _LIBRARY, python / _LIBRARY)
    for backend in added:
        (python.parent / backend.name).symlink_to(backend.folder)
    library = _libpython()
    libraries = scratch / "lib"
    libraries.mkdir()
    # A link of its own, so that nothing else beside libpython is put before the system's.
    (libraries / library.name).symlink_to(library)
    # By a link of the scratch folder's, since a colon or semicolon in a path would end it.
    (libraries / BUNDLED).symlink_to(home.parent.parent / BUNDLED)
    return python.parent, libraries


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _libpython() -> Path:
    name = f"libpython{_python()}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = [
        Path(sys.base_prefix, "lib"),
        Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
        *(Path(root, multiarch) for root in ("/usr/lib", "/lib", "/usr/local/lib")),
        Path("/usr/lib64"),
    ]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ServerError(
        f"the embedded Triton needs {name}, which this Python lacks",
        mend=f"apt install libpython{_python()}, or use --runtime docker",
    )


def prepare_embedded(settings: ServerSettings, instance: Instance) -> Launch:
    """Start it with the backends laid out in its scratch folder."""
    home = find_embedded()
    backends, libraries = lay_out(home, instance.scratch, _backends(settings)[0])
    return Launch(
        argv=(
            str(home / "bin" / "tritonserver"),
            f"--backend-directory={backends}",
            f"--model-repository={link_models(settings, instance.scratch)}",
            *triton_args(settings, instance),
        ),
        env={
            **environment(libraries, stub_site.write(instance.scratch / "python")),
            **settings.env,
        },
        kind="embedded",
    )


# In rounds of GNU's OpenMP; a few hundredths of a millisecond.
_SPINS = "1000"
# In bytes; 32 MiB is as much as the C library lets its first figure be.
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


def environment(libraries: Path, programs: Path) -> dict[str, str]:
    """Return the environment in which the server finds its libraries and the stub its Python."""
    env = environment_of_triton()
    found = [str(libraries), str(libraries / BUNDLED), env.get("LD_LIBRARY_PATH", "")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, found))
    # Threads that sleep at once are woken a hundred times in a step of a small model, which costs
    # a third of it; those that wait a few hundredths of a millisecond first hardly ever are. To
    # wait longer gains next to nothing, and where two models share the cores each then holds up the
    # other: with ten times these rounds both are four times slower than with these.
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", _SPINS)
    # A cache that is copied with every token takes and frees the same memory over and over. Given
    # back to the system in between, it comes again page by page, and a step takes twice as long.
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env):
        env.update(_KEPT)
    # For the programs that a model starts; the stub's own Python does not look at it.
    env.setdefault("PYTHONUTF8", "1")
    # onnxruntime would report its use to its makers.
    env.setdefault("ORT_DISABLE_TELEMETRY", "1")
    # Triton starts a model's process through bash, and waits for ever where there is none.
    env["PATH"] = os.pathsep.join(filter(None, [str(programs), env.get("PATH"), os.defpath]))
    return env
