"""The Triton inside the ``nvidia-pytriton`` wheel, which needs no container and no GPU."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.contract.container import release
from llmserve.errors import LLMServeError, PluginError, ServerError
from llmserve.hardware import share_cores
from llmserve.packages import EMBEDDED, OLD_NUMPY, install_command, too_new_numpy
from llmserve.problems import Problem
from llmserve.server.find import stub_site
from llmserve.server.find.launch import (
    Instance,
    Launch,
    environment_of_triton,
    link_models,
    triton_args,
)
from llmserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmserve.plugins.roles import Backend

RELEASE = release("24.10")
"""What nvidia-pytriton 0.7.0 contains, the oldest version that llmserve installs."""
_LIBRARY = "libtriton_python.so"
BUNDLED = "nvidia_pytriton.libs"


def find_embedded() -> Path:
    """Return the folder of the installed server; raise an error that names what is missing.

    ``pytriton`` itself is not imported: that takes a second and has side effects.
    """
    if sys.version_info >= (3, 13):
        raise ServerError(f"the embedded Triton does not run on Python {_python()}", hint=_hint())
    try:
        distribution = metadata.distribution(EMBEDDED)
    except metadata.PackageNotFoundError as error:
        raise ServerError(f"{error.name} is not installed", hint=_hint()) from None
    if numpy := too_new_numpy():
        raise ServerError(
            f"the embedded Triton needs {OLD_NUMPY} and this is {numpy}",
            hint=f"{install_command(OLD_NUMPY)}, or use --runtime docker",
        )
    home = Path(str(distribution.locate_file("pytriton/tritonserver")))
    if not (home / "bin" / "tritonserver").is_file():
        raise ServerError(
            "this nvidia-pytriton has no server: it has one for Linux alone", hint=_hint()
        )
    return home


def _hint() -> str:
    install = install_command("llmserve[embedded]")
    return f"{install} on Python 3.10 to 3.12, or use --runtime docker"


def _backends(
    settings: ServerSettings,
) -> tuple[tuple[Backend, ...], dict[str, LLMServeError]]:
    """Return the additional backends: those of the settings, else all that plugins register.

    The errors of backends that several plugins register are returned by name.
    """
    if settings.backends is not None:
        return settings.backends, {}
    from llmserve.plugins.registry import Registry
    from llmserve.plugins.roles import Backend

    registry = Registry.load()
    usable: list[Backend] = []
    clashes: dict[str, LLMServeError] = {}
    for name in sorted({backend.name for backend in registry.all(Backend)}):
        try:
            usable.append(registry.get(Backend, name))
        except PluginError as error:
            clashes[name] = error
    return tuple(usable), clashes


def missing_backends(settings: ServerSettings) -> list[Problem]:
    """Return a problem for each model to load that needs a missing backend."""
    from llmserve.repository import config

    backends, clashes = _backends(settings)
    installed = {backend.name: Path(backend.folder, "model.py") for backend in backends}
    problems: list[Problem] = []
    models = settings.opened.models
    for name in settings.names():
        if name not in models or models[name].config is None:
            continue
        needed = config.backend_of(models[name].config)
        if needed in clashes:
            problems.append(Problem.of(clashes[needed], name))
        elif needed not in {"", "python", "ensemble", *installed}:
            what = f"it needs Triton's backend {needed!r}, which the embedded server lacks"
            hint = "install a plugin that has it, such as llmserve-standins"
            problems.append(Problem(name, what, f"{hint}, or use --runtime docker"))
        elif needed in installed and not installed[needed].is_file():
            what = f"its backend {needed!r} has no {installed[needed]}"
            hint = "report this to the plugin's author"
            problems.append(Problem(name, what, hint, code="plugin"))
    return problems


def lay_out(home: Path, scratch: Path, added: Sequence[Backend]) -> tuple[Path, Path]:
    """Lay out the backends and libraries in ``scratch``; return both folders.

    The Python backend expects its stub in its own folder, but the wheel keeps a stub for each
    Python version elsewhere.
    """
    stub = home / "python_backend_stubs" / _python() / "triton_python_backend_stub"
    python = scratch / "backends" / "python"
    python.mkdir(parents=True)
    bundled = home / "backends" / "python"
    for file in (bundled / "triton_python_backend_utils.py", stub):
        (python / file.name).symlink_to(file)
    # A backend written in Python runs this library, and Triton refuses a link that leads out of
    # the backends folder. The library is small, so it is copied.
    shutil.copyfile(bundled / _LIBRARY, python / _LIBRARY)
    for backend in added:
        (python.parent / backend.name).symlink_to(backend.folder)
    library = _libpython()
    libraries = scratch / "lib"
    libraries.mkdir()
    # A link to this file only, so that no other library from its folder precedes the system's.
    (libraries / library.name).symlink_to(library)
    # Through a link in the scratch folder, since a colon or semicolon would end the path.
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
        hint=f"apt install libpython{_python()}, or use --runtime docker",
    )


def prepare_embedded(settings: ServerSettings, instance: Instance) -> Launch:
    """Return the command of the embedded server, with backends laid out in its scratch folder."""
    home = find_embedded()
    backends, libraries = lay_out(home, instance.scratch, _backends(settings)[0])
    return Launch(
        argv=(
            str(home / "bin" / "tritonserver"),
            f"--backend-directory={backends}",
            f"--model-repository={link_models(settings, instance.scratch)}",
            *triton_args(settings, instance, RELEASE),
        ),
        env={
            **environment(libraries, stub_site.write(instance.scratch / "python")),
            **settings.env,
        },
        kind="embedded",
    )


# In bytes; 32 MiB is the C library's maximum for the first value.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


def environment(libraries: Path, programs: Path) -> dict[str, str]:
    """Return an environment in which the server finds its libraries and the stub its Python."""
    env = environment_of_triton()
    paths = [str(libraries), str(libraries / BUNDLED), env.get("LD_LIBRARY_PATH", "")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    share_cores(env)
    # A cache that is copied with every token allocates and frees the same memory repeatedly. If it
    # goes back to the system in between, it returns page by page, and a step takes twice as long.
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env):
        env.update(_MALLOC)
    # For the programs that a model starts; the stub's own Python ignores it.
    env.setdefault("PYTHONUTF8", "1")
    # Otherwise onnxruntime reports its use to its vendor.
    env.setdefault("ORT_DISABLE_TELEMETRY", "1")
    # See workarounds.NO_SHELL.
    env["PATH"] = os.pathsep.join(filter(None, [str(programs), env.get("PATH"), os.defpath]))
    return env
