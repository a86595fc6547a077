"""Offline checks of the written files, against the official schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from llmserve.errors import ConfigError, UsageError
from llmserve.plugin import install_command
from llmserve_deploy.pods import Data

COMPOSE_FILE = "compose.yaml"
# Kinds that others than Kubernetes define; only the pods in them are checked.
_FOREIGN = {
    "InferencePool", "InferenceService", "Kustomization", "PodMonitor", "PrometheusRule",
    "RayService", "ServingRuntime",
}  # fmt: skip


def require_packages() -> None:
    """Raise an error if a package that checks is missing."""
    for name in ("jsonschema", "kubernetes_validate", "check_jsonschema"):
        if find_spec(name) is None:
            raise UsageError(
                f"--check needs {name}", hint=install_command("llmserve-deploy[check]")
            )


def check(out: Path, names: list[str]) -> None:
    """Raise an error for the first invalid file."""
    validate = _validator()
    for name in names:
        path = out / name
        try:
            content = _read(path)
            if path.name == COMPOSE_FILE:
                _check_compose(path)
            elif path.suffix in (".yaml", ".json"):
                for part in _parts(path, content):
                    validate(part)
        except (ValueError, OSError, yaml.YAMLError) as error:
            where = ".".join(str(step) for step in getattr(error, "path", ()))
            what = " ".join(str(error).split())
            raise ConfigError(
                f"{path} is not valid: {where}{': ' if where else ''}{what}",
                hint="fix it by hand, and report it: llmserve should only write valid files",
            ) from None


def _validator() -> Callable[[Data], None]:
    """Return a function that validates an object against Kubernetes' schema for its kind."""
    import jsonschema
    import kubernetes_validate

    def validate(data: Data) -> None:
        try:
            kubernetes_validate.validate(data, kubernetes_validate.latest_version(), strict=True)
        except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            invalid = ValueError(error.message)
            invalid.path = getattr(error, "absolute_path", ())  # type: ignore[attr-defined]
            raise invalid from None

    return validate


def _check_compose(path: Path) -> None:
    """Check against the schema of the Compose specification, which check-jsonschema includes."""
    command = [sys.executable, "-m", "check_jsonschema", "--output-format", "json"]
    command += ["--builtin-schema", "vendor.compose-spec", str(path)]
    process = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if process.returncode:
        error = {"message": process.stderr}
        if process.stdout:
            error = json.loads(process.stdout)["errors"][0]
        raise ValueError(f"{error.get('path', '')} {error['message']}")


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    return yaml.safe_load(text) if path.suffix == ".yaml" else text


def _parts(path: Path, content: Any) -> Iterator[Data]:
    """Yield the objects in a file that Kubernetes has a schema for."""
    if not isinstance(content, dict):
        raise ValueError("it is empty")
    kind = content.get("kind", "")
    base = path.parent.parent.parent / "base" / path.name
    if kind and kind not in _FOREIGN:
        is_patch = path.parent.parent.name == "overlays" and base.is_file()
        yield merged(_read(base), content) if is_patch else content
    elif kind == "ServingRuntime":
        yield _pod(content["spec"], "containers", "volumes", "tolerations")
    elif kind == "InferenceService":
        pod = _pod(content["spec"]["predictor"], "automountServiceAccountToken", "securityContext",
                   "terminationGracePeriodSeconds", "topologySpreadConstraints")  # fmt: skip
        pod["spec"]["containers"] = [{"name": "none"}]
        yield pod
    elif kind == "RayService":
        cluster = content["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            spec = group["template"]["spec"]
            yield _pod(spec, *spec)
    elif kind == "Kustomization":
        patches = content.get("patches", ())
        for name in [*content["resources"], *(patch["path"] for patch in patches)]:
            if not (path.parent / name).exists():
                raise ValueError(f"there is no {name}")


def _pod(spec: Data, *fields: str) -> Data:
    """Return a Pod with these fields, so that Kubernetes' schema checks them."""
    kept = {name: spec[name] for name in fields if name in spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked"}, "spec": kept}


def merged(base: Any, patch: Any) -> Any:
    """Apply a patch as kustomize does, as far as ours need it: list items match by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        new = {name: merged(base[name], patch[name]) if name in base else patch[name]
               for name in patch}  # fmt: skip
        return base | new
    if isinstance(base, list) and all(isinstance(item, dict) and "name" in item for item in patch):
        patches = {item["name"]: item for item in patch}
        return [merged(item, patches.get(item["name"], {})) for item in base]
    return patch
