"""What lies beside a model's configuration, however many models a build makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve import __version__, modelconfig
from llmserve.builder import dockerfile
from llmserve.builder.common import REQUEST_OPTIONS
from llmserve.builder.context import BuildContext
from llmserve.builder.needs import Needs
from llmserve.builder.plan import Plan
from llmserve.builder.requirements import with_own_needs
from llmserve.errors import PluginError
from llmserve.manifest import Manifest
from llmserve.roles import Component

VERSION_FOLDER = "1"
MODEL_PY = "from llmserve.runtime.model import TritonPythonModel as TritonPythonModel\n"


def described(component: Component, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the runtime needs of a component to make its class."""
    return {"name": component.name, "runtime": component.runtime, "settings": dict(settings)}


def write_entry(context: BuildContext) -> None:
    """Write the one line that makes Triton's Python backend run our runtime."""
    context.folder.mkdir(parents=True, exist_ok=True)
    (context.folder / "model.py").write_text(MODEL_PY, encoding="utf-8")


def write_config(plan: Plan, context: BuildContext, *, parts: Sequence[str] = ()) -> None:
    """Write ``config.pbtxt``, with what a client reads from a running server.

    ``parts`` are all models that answer under this one's name: an ensemble's steps do not name
    those that another of them asks.
    """
    modelconfig.set_parameters(
        context.config,
        {
            "llmserve.version": __version__,
            "llmserve.recipe": plan.recipe.name,
            "llmserve.exchange": context.exchange,
            **({"llmserve.parts": " ".join(sorted(parts))} if parts else {}),
        },
    )
    text = modelconfig.to_text(context.config)
    (context.folder.parent / modelconfig.FILE).write_text(text, encoding="utf-8")


def write_client(plan: Plan, context: BuildContext) -> None:
    """Write the client: a module of ours or of the plugin's, verbatim."""
    source = _source_of(plan.recipe.client)
    (context.folder.parent / "client.py").write_text(source, encoding="utf-8")


def write_manifest(
    plan: Plan,
    context: BuildContext,
    components: Mapping[str, Any],
    packages: Mapping[str, str],
    *,
    part_of: str = "",
    parts: Sequence[str] = (),
) -> Manifest:
    """Write the manifest, which holds the hash of every other file and so comes last."""
    # Of a build's models, what all of them need is told by the one that was asked for.
    container = None if part_of else context.container
    if container:
        packages = with_own_needs(packages)
    manifest = Manifest(
        name=context.name,
        recipe=plan.recipe.name,
        plugin=plan.origin,
        exchange=context.exchange,
        source=context.source.described(),
        options=dict(plan.options),
        components=components,
        contract=_contract(plan),
        packages=packages,
        trust_remote_code=bool(plan.options["trust_remote_code"]),
        llmserve=__version__,
        part_of=part_of,
        parts=sorted(parts),
        image=container.image if container else "",
        brought=sorted(container.brings) if container else (),
    )
    if container and (needs := Needs.of(manifest)):
        folder = context.folder.parent
        text = dockerfile.of_model(context.name, needs, folder)
        (folder / dockerfile.FILE).write_text(text, encoding="utf-8")
    manifest.write(context.folder.parent)
    return manifest


def _contract(plan: Plan) -> dict[str, Any]:
    """What the runtime must know of requests beside the tensors in the configuration."""
    return {
        "inputs": sorted(tensor.name for tensor in plan.inputs),
        "defaults": {option.name: plan.options[option.name] for option in REQUEST_OPTIONS},
        "extras": sorted(plan.extras),
    }


def _source_of(module: str) -> str:
    """Return a module's source as it stands."""
    found = find_spec(module)
    if found is None or not found.origin:
        raise PluginError(f"the recipe's client {module} cannot be found")
    return Path(found.origin).read_text(encoding="utf-8")
