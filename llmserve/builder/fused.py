"""One model that does it all: what a generator of the Python backend becomes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve import __version__, modelconfig
from llmserve.builder.common import REQUEST_OPTIONS
from llmserve.builder.context import BuildContext
from llmserve.builder.plan import Plan
from llmserve.errors import PluginError
from llmserve.manifest import Manifest
from llmserve.runtime.contract import SAMPLING
from llmserve.runtime.params import READERS

VERSION_FOLDER = "1"
MODEL_PY = "from llmserve.runtime.model import TritonPythonModel as TritonPythonModel\n"


def write_model(
    plan: Plan, context: BuildContext, folder: Path, packages: Mapping[str, str]
) -> Manifest:
    """Write a model's folder: configuration, entry, files, client and, last, the manifest."""
    config = context.config
    modelconfig.add_inputs(config, plan.inputs)
    modelconfig.add_outputs(config, plan.formatter.outputs)
    context.folder.mkdir(parents=True)
    components = {}
    for role, component in plan.components():
        settings = dict(component.prepare(context)) if component.prepare else {}
        components[role] = {
            "name": component.name,
            "runtime": component.runtime,
            "settings": settings,
        }
    modelconfig.set_parameters(
        config,
        {
            "llmserve.version": __version__,
            "llmserve.recipe": plan.recipe.name,
            "llmserve.exchange": context.exchange,
        },
    )
    _write(context.folder / "model.py", MODEL_PY)
    _write(folder / modelconfig.FILE, modelconfig.to_text(config))
    _write(folder / "client.py", _source_of(plan.recipe.client))
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
    )
    manifest.write(folder)
    return manifest


def _contract(plan: Plan) -> dict[str, Any]:
    """What the runtime must know of requests beside the tensors in the configuration."""
    ours = {*READERS, *(tensor.name for tensor in SAMPLING)}
    given = (tensor.name for tensor in plan.generator.inputs)
    return {
        "inputs": sorted(tensor.name for tensor in plan.inputs),
        "defaults": {option.name: plan.options[option.name] for option in REQUEST_OPTIONS},
        "extras": sorted(name for name in given if name not in ours),
    }


def _source_of(module: str) -> str:
    """Return a module's source as it stands: the emitted client is a file of ours, verbatim."""
    found = find_spec(module)
    if found is None or not found.origin:
        raise PluginError(f"the recipe's client {module} cannot be found")
    return Path(found.origin).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
