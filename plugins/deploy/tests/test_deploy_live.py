"""A deployment's probes and queries, checked against a gateway with a real Triton."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from llmserve.testing import LiveTriton, run
from llmserve.testing.command import LLMSERVE
from llmserve_deploy.dashboard import ALERTS, PANELS
from llmserve_deploy.description import KEYS_FOLDER, Deployment, describe
from llmserve_deploy.targets import files_of

# The series that the endpoint picker of the Gateway API inference extension uses.
PICKER = ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]


@pytest.fixture(scope="module")
def model(triton: LiveTriton) -> str:
    return triton.build("iterative")


@pytest.fixture(scope="module")
def deployment(triton: LiveTriton, model: str) -> Deployment:
    return describe(triton.repository, baked=True, models=(model,))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a file of keys, and the key that the next steps create for Prometheus."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    command = ("key", "new", "prometheus", "--file", str(path), "--model", "none", "--all-metrics")
    result = run(*command)
    return path, result.stdout.strip()


@pytest.fixture(scope="module")
def gateway(triton: LiveTriton, deployment: Deployment, key: tuple[Path, str]) -> Iterator[str]:
    """Run the gateway as the pod does, except for addresses, ports and the folder of keys."""
    replacements = {
        "grpc://127.0.0.1:8001": triton.server.grpc_url,
        "http://127.0.0.1:8002/metrics": triton.server.metrics_url,
        "0.0.0.0": "127.0.0.1",
        "8080": "0",
        f"{KEYS_FOLDER}/keys.json": str(key[0]),
    }
    _, *words = deployment.gateway_command("127.0.0.1")
    assert set(replacements) <= set(words)
    command = [*LLMSERVE, *(replacements.get(word, word) for word in words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
    assert process.stderr
    line = process.stderr.readline()
    assert "://" in line, line
    yield line.split()[-1].removesuffix("/v1")
    process.terminate()
    assert process.wait(60) == 0


def fetch(url: str, key: str = "", body: object = None) -> str:
    data = json.dumps(body).encode() if body else None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with urlopen(Request(url, data, headers), timeout=60) as response:
        return str(response.read().decode())


def test_the_probes_of_a_pod_are_answered(gateway: str, deployment: Deployment) -> None:
    pod = files_of("kubernetes", deployment, Path(), dashboard=False)["base/deployment.yaml"]
    probes = [
        probe["httpGet"]["path"]
        for container in pod["spec"]["template"]["spec"]["containers"]
        for name, probe in container.items()
        if name.endswith("Probe")
    ]
    assert set(probes) == {"/livez", "/readyz", "/readyz?all"}
    for path in probes:
        fetch(gateway + path)


def test_every_panel_alert_and_rule_names_an_existing_series(
    gateway: str, deployment: Deployment, model: str, key: tuple[Path, str]
) -> None:
    path, scrape_key = key
    result = run("key", "new", "me", "--file", str(path))
    body = {"model": model, "prompt": "Hi", "max_tokens": 4, "stream": True}
    fetch(f"{gateway}/v1/completions", result.stdout.strip(), body)
    with pytest.raises(HTTPError, match="403"):
        fetch(f"{gateway}/v1/completions", scrape_key, body)

    files = files_of("kubernetes", deployment, Path(), dashboard=True)
    endpoints = files["base/podmonitor.yaml"]["spec"]["podMetricsEndpoints"]
    text = "".join(fetch(gateway + endpoint["path"], scrape_key) for endpoint in endpoints)
    live: dict[str, set[str]] = {}
    for name, labels in re.findall(r"(?m)^([a-z][\w:]*)(?:\{(.*)\})? ", text):
        live.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))

    rules = files["prometheus-adapter.yaml"]["rules"]["custom"]
    queries = [query for _, _, panel in PANELS for query in panel.values()]
    queries += [query for _, query, *_ in ALERTS]
    queries += [rule["seriesQuery"] for rule in rules] + [rule["metricsQuery"] for rule in rules]
    for query in [*queries, *PICKER]:
        names = re.findall(r"\b(?:vllm:|llmserve_|nv_)\w+", query)
        assert names or "<<.Series>>" in query, query
        for series in names:
            assert series in live, query
            by = {label for group in re.findall(r"by \(([\w, ]+)\)", query)
                  for label in group.split(", ")}  # fmt: skip
            assert by <= live[series], query
