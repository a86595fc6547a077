"""What is wrong with written files, found offline, by others' schemas where there are any."""

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
from llmserve_deploy.pods import Data
from llmserve_deploy.schemas import FILES, KINDS, SERVE, Schema

COMPOSE_FILE = "compose.yaml"


def check(out: Path, names: list[str]) -> None:
    """Raise an error that names the first thing that is wrong."""
    validate = _validators()
    for name in names:
        path = out / name
        try:
            content = _read(path)
            if path.name == COMPOSE_FILE:
                _check_compose(path)
            elif path.suffix in (".yaml", ".json"):
                for part, schema in _parts(path, content):
                    validate(part, schema)
        except (ValueError, OSError, yaml.YAMLError) as error:
            where = ".".join(str(step) for step in getattr(error, "path", ()))
            what = " ".join(str(error).split())
            raise ConfigError(
                f"{path} is not valid: {where}{': ' if where else ''}{what}",
                mend="mend it by hand, and report it: what is written ought to be valid",
            ) from None


def _validators() -> Callable[[Data, Schema | None], None]:
    """Return what validates data against a schema, or against Kubernetes' own for its kind."""
    for needed in ("jsonschema", "kubernetes_validate", "check_jsonschema"):
        if find_spec(needed) is None:
            raise UsageError(f"--check needs {needed}", mend="pip install 'llmserve-deploy[check]'")
    import jsonschema
    import kubernetes_validate

    def validate(data: Data, schema: Schema | None) -> None:
        try:
            if schema is not None:
                jsonschema.Draft202012Validator(schema).validate(data)
            else:
                kubernetes_validate.validate(
                    data, kubernetes_validate.latest_version(), strict=True
                )
        except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found = ValueError(error.message)
            found.path = getattr(error, "absolute_path", ())  # type: ignore[attr-defined]
            raise found from None

    return validate


def _check_compose(path: Path) -> None:
    """Ask the Compose specification's schema, which comes with check-jsonschema's command."""
    command = [sys.executable, "-m", "check_jsonschema", "--output-format", "json"]
    command += ["--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        found = json.loads(done.stdout)["errors"][0] if done.stdout else {"message": done.stderr}
        raise ValueError(f"{found.get('path', '')} {found['message']}")


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    return yaml.safe_load(text) if path.suffix == ".yaml" else text


def _parts(path: Path, content: Any) -> Iterator[tuple[Data, Schema | None]]:
    """Give what is in a file, each with its schema; None stands for Kubernetes' own."""
    if not isinstance(content, dict):
        raise ValueError("it is empty")
    kind = content.get("kind", "")
    base = path.parent.parent.parent / "base" / path.name
    if kind not in KINDS and path.parent.parent.name == "overlays" and base.is_file():
        yield merged(_read(base), content), None
        return
    yield content, KINDS.get(kind) if kind else FILES.get(path.name, {})
    if kind == "ServingRuntime":
        yield _pod(content["spec"], "containers", "volumes", "tolerations"), None
    elif kind == "InferenceService":
        pod = _pod(content["spec"]["predictor"], "automountServiceAccountToken", "securityContext",
                   "terminationGracePeriodSeconds", "topologySpreadConstraints")  # fmt: skip
        pod["spec"]["containers"] = [{"name": "none"}]
        yield pod, None
    elif kind == "RayService":
        yield yaml.safe_load(content["spec"]["serveConfigV2"]), SERVE
        cluster = content["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            spec = group["template"]["spec"]
            yield _pod(spec, *spec), None
    elif kind == "Kustomization":
        named = [*content["resources"], *(one["path"] for one in content.get("patches", ()))]
        for name in named:
            if not (path.parent / name).exists():
                raise ValueError(f"there is no {name}")


def _pod(spec: Data, *fields: str) -> Data:
    """Return a Pod of these fields, so that Kubernetes' schema reads them."""
    kept = {name: spec[name] for name in fields if name in spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked"}, "spec": kept}


def merged(base: Any, patch: Any) -> Any:
    """Return what kustomize makes of both, as far as our patches need it: lists go by names."""
    if isinstance(base, dict) and isinstance(patch, dict):
        new = {name: merged(base[name], patch[name]) if name in base else patch[name]
               for name in patch}  # fmt: skip
        return base | new
    if isinstance(base, list) and all(isinstance(one, dict) and "name" in one for one in patch):
        patches = {one["name"]: one for one in patch}
        return [merged(one, patches.get(one["name"], {})) for one in base]
    return patch
