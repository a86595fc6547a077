"""What a deployment says to and of the gateway, held against a gateway before a real Triton."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from llmserve.testing import LiveTriton
from llmserve_deploy.dashboard import ALERTS, PANELS
from llmserve_deploy.description import KEYS_FOLDER, Deployment, describe
from llmserve_deploy.targets import files_of
from tests.support import LLMSERVE, run

# What the endpoint picker of the Gateway API inference extension looks for.
PICKER = ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]


@pytest.fixture(scope="module")
def model(triton: LiveTriton) -> str:
    return triton.build("iterative")


@pytest.fixture(scope="module")
def deployment(triton: LiveTriton, model: str) -> Deployment:
    return describe(triton.repository, baked=True, models=(model,))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a file of keys, and the key that the next steps make for Prometheus."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = run("key", "new", "prometheus", "--file", str(path), "--model", "none")
    return path, made.stdout.strip()


@pytest.fixture(scope="module")
def gateway(triton: LiveTriton, deployment: Deployment, key: tuple[Path, str]) -> Iterator[str]:
    """Run the gateway as the pod does, but for places: addresses, ports and the folder of keys."""
    places = {
        "grpc://127.0.0.1:8001": triton.server.grpc_url,
        "http://127.0.0.1:8002/metrics": triton.server.metrics_url,
        "0.0.0.0": "127.0.0.1",
        "8080": "0",
        f"{KEYS_FOLDER}/keys.json": str(key[0]),
    }
    _, *words = deployment.gateway_command("127.0.0.1")
    assert set(places) <= set(words)
    command = [*LLMSERVE, *(places.get(word, word) for word in words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8")
    assert process.stderr
    told = process.stderr.readline()
    assert "://" in told, told
    yield told.split()[-1].removesuffix("/v1")
    process.terminate()
    assert process.wait(60) == 0


def ask(url: str, key: str = "", body: object = None) -> str:
    data = json.dumps(body).encode() if body else None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with urlopen(Request(url, data, headers), timeout=60) as answer:
        return str(answer.read().decode())


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
        ask(gateway + path)


def test_every_panel_alert_and_rule_names_a_series_that_there_is(
    gateway: str, deployment: Deployment, model: str, key: tuple[Path, str]
) -> None:
    path, scraping = key
    made = run("key", "new", "me", "--file", str(path))
    body = {"model": model, "prompt": "Hi", "max_tokens": 4, "stream": True}
    ask(f"{gateway}/v1/completions", made.stdout.strip(), body)
    with pytest.raises(HTTPError, match="403"):
        ask(f"{gateway}/v1/completions", scraping, body)

    files = files_of("kubernetes", deployment, Path(), dashboard=True)
    scraped = files["base/podmonitor.yaml"]["spec"]["podMetricsEndpoints"]
    text = "".join(ask(gateway + each["path"], scraping) for each in scraped)
    live: dict[str, set[str]] = {}
    for name, labels in re.findall(r"(?m)^([a-z][\w:]*)(?:\{(.*)\})? ", text):
        live.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))

    rules = files["prometheus-adapter.yaml"]["rules"]["custom"]
    queries = [query for _, _, found in PANELS for query in found.values()]
    queries += [query for _, query, *_ in ALERTS]
    queries += [rule["seriesQuery"] for rule in rules] + [rule["metricsQuery"] for rule in rules]
    for query in [*queries, *PICKER]:
        named = re.findall(r"\b(?:vllm:|llmserve_|nv_)\w+", query)
        assert named or "<<.Series>>" in query, query
        for series in named:
            assert series in live, query
            by = {label for group in re.findall(r"by \(([\w, ]+)\)", query)
                  for label in group.split(", ")}  # fmt: skip
            assert by <= live[series], query
