"""The files of each target, and the commands that remain to be run by hand."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from llmserve.plugin import install_command, without_index
from llmserve_deploy.compose import compose_files
from llmserve_deploy.dashboard import dashboard_files
from llmserve_deploy.description import KEYS_FILE, Deployment
from llmserve_deploy.images import GATEWAY_DOCKERFILE, MODELS_DOCKERFILE, OURS
from llmserve_deploy.kserve import kserve_files
from llmserve_deploy.kubernetes import kubernetes_files
from llmserve_deploy.rayserve import (
    RAY_DOCKERFILE,
    RAY_SERVICE,
    SERVE_FILE,
    ray_files,
)

TARGETS = ("compose", "kubernetes", "kserve", "ray")


def files_of(target: str, d: Deployment, out: Path, *, dashboard: bool) -> dict[str, Any]:
    """Return the content of all files by their paths."""
    if target == "compose":
        files = compose_files(d, out)
    elif target == "ray":
        files = ray_files(d, out)
    else:
        files = kubernetes_files(d) if target == "kubernetes" else kserve_files(d)
    return files | (dashboard_files(d, operator=target != "compose") if dashboard else {})


def next_steps(target: str, d: Deployment, out: Path, dashboard: bool) -> list[str]:
    """Return the commands; one that creates a key is piped into the one that stores it."""
    folder, cluster = quote(str(out)), target != "compose"
    new_key = f"llmserve key new {{}} --file {folder}/{KEYS_FILE}"
    steps = []
    if not d.wheels and (missing := without_index(OURS)):
        steps += [
            f"# {' and '.join(missing)} came from a folder: unless an index has them,",
            "# give --vendor to this and to llmserve build, which brings their wheels",
        ]
    # An image with a digest is already built and pushed.
    if "@" not in d.image:
        steps += [d.build]
        if cluster and not d.volume:
            models = f"{folder}/{MODELS_DOCKERFILE} {quote(str(d.repository))}"
            steps += [f"docker build -t {d.image} -f {models}"]
        elif d.image != d.built_image:
            steps += [f"docker tag {d.built_image} {d.image}"]
    if "@" not in d.gateway_image:
        dockerfile = RAY_DOCKERFILE if target == "ray" else GATEWAY_DOCKERFILE
        steps += [f"docker build -t {d.gateway_image} -f {folder}/{dockerfile} {folder}"]
    steps += [] if d.no_auth else [new_key.format("me")]
    if not cluster:
        # Docker would create it for root, and Triton could not write to it.
        steps += ['mkdir -p "${HF_HOME:-$HOME/.cache/huggingface}"']
        start = f"docker compose -f {folder}/compose.yaml up --wait"
        return [*steps, f"LLMSERVE_USER=$(id -u) {start}"]
    if target == "ray":
        serve = f"PYTHONPATH=$(realpath {folder}) serve run {folder}/{SERVE_FILE}"
        steps += [
            f"# here, without images: {install_command('llmserve-deploy[ray]')}",
            f"# {serve}",
        ]
    steps += ["# push the images to the registry that the cluster pulls from"]
    if not d.no_auth:
        create = "kubectl create secret generic"
        if d.scrapes_by_key and target != "ray":
            # This key may read metrics, but may not query any model.
            steps += [
                f"{new_key.format('prometheus')} --model none --all-metrics |"
                f" tr -d '\\n' |"
                f" {create} {d.metrics_secret} --from-file=key=/dev/stdin"
            ]
        steps += [f"{create} {d.keys_secret} --from-file={folder}/{KEYS_FILE}"]
    if target == "ray":
        return [*steps, f"kubectl apply -f {folder}/{RAY_SERVICE}"]
    overlay = f"/overlays/{'gpu' if d.gpus else 'cpu'}" if target == "kubernetes" else ""
    steps += [f"kubectl apply -k {folder}{overlay}"]
    if target == "kserve" and d.scrapes_by_key:
        steps += ["# inferencepool.yaml needs --open-metrics: an endpoint picker sends no key"]
    return steps + ([f"kubectl apply -f {folder}/alerts.yaml"] if dashboard else [])
