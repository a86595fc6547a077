"""The written files, their validity, and the errors.

``python plugins/deploy/tests/test_deploy_files.py`` regenerates the golden files.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from llmserve.contract.container import SERVERS, UNKNOWN, release
from llmserve.errors import LLMServeError
from llmserve.plugin import Manifest
from llmserve.runtime import adapter_names
from llmserve_deploy import checking
from llmserve_deploy.checking import check
from llmserve_deploy.commands import deploy
from llmserve_deploy.description import Deployment, describe
from llmserve_deploy.files import rendered, write
from llmserve_deploy.targets import TARGETS, files_of, next_steps

GOLDEN = Path(__file__).with_name("golden")
OPTIONS: dict[str, dict[str, Any]] = {
    "compose": {"gpus": 1},
    "kubernetes": {"gpus": 2, "image": "registry.example/models:1"},
    "kserve": {"volume": "models", "models": ("b",), "open_metrics": True},
    "ray": {"gateway_image": "llmserve-ray", "gpus": 1, "models": ("b",), "cpus": "1500m"},
}


def add_model(repository: Path, name: str, **fields: Any) -> Path:
    """Create a folder that looks like a model built by llmserve."""
    folder = repository / name
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").touch()
    empty: Any = {key: {} for key in ("source", "options", "components", "contract", "packages")}
    fields = {"recipe": "r", "plugin": "p", "exchange": "text", "llmserve": "1", **empty, **fields}
    Manifest(name=name, trust_remote_code=False, **fields).write(folder)
    return folder


def make_repository(folder: Path) -> Path:
    add_model(folder, "a")
    add_model(folder, "b", parts=["b_generator"])
    add_model(folder, "b_generator", part_of="b")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


def describe_for(target: str, repository: Path, **more: Any) -> Deployment:
    return describe(repository, baked=target != "compose", **{**OPTIONS[target], **more})


def golden(target: str, folder: Path) -> dict[str, bytes]:
    """Return the files of a target; for KServe and Ray, only those that no other target has."""
    d = describe_for(target, make_repository(folder / "repository"))
    files = rendered(files_of(target, d, folder / "out", dashboard=False))
    shared = (*(f"{name}.yaml" for name in (
        "networkpolicy", "poddisruptionbudget", "podmonitor", "prometheus-adapter",
        "queue-to-compute",
    )), "Dockerfile.gateway")  # fmt: skip
    left_out = {"kserve": shared, "ray": ("llmserve_ray.py", "Dockerfile.models")}.get(target, ())
    return {name: text for name, text in files.items() if name not in left_out}


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_equal_the_golden_ones_every_time(target: str, tmp_path: Path) -> None:
    files = golden(target, tmp_path / "one")
    assert files == golden(target, tmp_path / "two")
    paths = [path for path in (GOLDEN / target).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(GOLDEN / target)): path.read_bytes() for path in paths}
    assert files == expected


@pytest.fixture
def with_adapter(repository: Path) -> Path:
    """The repository, of which one model has an adapter."""
    adapter = repository / "a" / "1" / "adapters" / "sql"
    adapter.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    return repository


@pytest.mark.parametrize("target", ["kubernetes", "kserve", "ray"])
def test_the_adapters_of_models_are_in_the_image_that_has_the_models(
    target: str, with_adapter: Path, tmp_path: Path
) -> None:
    d = describe(with_adapter, baked=True)
    files = rendered(files_of(target, d, tmp_path / "out", dashboard=False))
    image = tmp_path / "image"
    # As Docker does it: the repository is the context, and nothing in it is left out.
    assert not any(name.endswith(".dockerignore") for name in files)
    assert not [*with_adapter.glob(".dockerignore")]
    for line in files["Dockerfile.models"].decode().splitlines():
        if line.startswith("COPY"):
            *_, source, to = line.split()
            shutil.copytree(with_adapter / source, image / to.lstrip("/"))
    (models,) = image.iterdir()
    assert adapter_names(models / "a" / "1") == ["sql"]
    assert len([*models.rglob("sql/*")]) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_the_adapters_of_models_are_on_the_volume_that_has_the_models(
    target: str, with_adapter: Path, tmp_path: Path
) -> None:
    """One that is added there is seen by all pods, which only read them."""
    baked = target != "compose"
    d = describe(with_adapter, baked=baked, volume="claim" if baked else None)
    out = tmp_path / "out"
    files = files_of(target, d, out, dashboard=False)
    assert "Dockerfile.models" not in files
    fields = [field for content in files.values() if isinstance(content, dict)
              for field in fields_of(content)]  # fmt: skip
    if target == "kserve":
        assert ("storageUri", "pvc://claim") in fields
    elif baked:
        mounts = [each for name, value in fields if name == "volumeMounts" for each in value]
        (mount,) = [each for each in mounts if each["name"] == "models"]
        assert (mount["mountPath"], mount["readOnly"]) == ("/models", True)
        claims = [value for name, value in fields if name == "persistentVolumeClaim"]
        assert {claim["claimName"] for claim in claims} == {"claim"}
    else:
        mounts = [each for name, value in fields if name == "volumes" for each in value]
        (mount,) = [each for each in mounts if each.get("target") == "/models"]
        assert adapter_names((out / mount["source"] / "a" / "1").resolve()) == ["sql"]


def test_what_cannot_be_checked_is_not_written(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "find_spec", lambda name: None if name == "jsonschema" else name)
    words = ["compose", str(repository), "--out", str(tmp_path / "out"), "--check"]
    error = CliRunner().invoke(deploy, words, standalone_mode=False).exception
    assert str(error).startswith("--check needs jsonschema: ")
    assert not (tmp_path / "out").exists()


VARIANTS: list[dict[str, Any]] = [
    {}, {"no_auth": True, "gpus": 1, "max_replicas": 9, "models": ("b",), "volume": "v"},
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("more", VARIANTS)
def test_all_written_files_are_valid(
    target: str,
    more: dict[str, Any],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A relative path, as users give it.
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    d = describe(repository, baked=target != "compose", **more)
    files = rendered(files_of(target, d, out, dashboard=True))
    write(files, out, force=False)
    check(out, list(files))


@pytest.mark.parametrize(
    ("target", "file", "old", "new", "message"),
    [
        ("kubernetes", "base/deployment.yaml", "periodSeconds", "periodSecond", "periodSecond"),
        ("kubernetes", "overlays/gpu/deployment.yaml", "limits:", "limit:", "limit"),
        ("kubernetes", "base/kustomization.yaml", "- service.yaml", "- gone.yaml", "gone.yaml"),
        ("kserve", "servingruntime.yaml", "failureThreshold", "failures", "failures"),
        ("ray", "rayservice.yaml", "containerPort", "port", "port"),
        ("compose", "compose.yaml", "healthcheck", "health", "health"),
        ("compose", "compose.yaml", "services:", "services: [", "flow"),
    ],
)
def test_a_mistake_is_reported_with_the_file_and_the_name(
    target: str, file: str, old: str, new: str, message: str, repository: Path, tmp_path: Path
) -> None:
    files = files_of(target, describe_for(target, repository), tmp_path, dashboard=False)
    write(rendered(files), tmp_path, force=True)
    path = tmp_path / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(LLMServeError) as caught:
        check(tmp_path, [file])
    assert f"{path} is not valid: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def fields_of(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every field of nested data."""
    for name, value in content.items() if isinstance(content, dict) else ():
        yield name, value
    for value in content.values() if isinstance(content, dict) else content:
        if isinstance(value, dict | list):
            yield from fields_of(value)


@pytest.mark.parametrize("target", ["kubernetes", "kserve", "ray"])
@pytest.mark.parametrize("open_metrics", [False, True])
def test_the_next_steps_create_every_required_secret(
    target: str, open_metrics: bool, repository: Path, tmp_path: Path
) -> None:
    d = describe(repository, baked=True, open_metrics=open_metrics)
    required = set()
    for content in files_of(target, d, tmp_path, dashboard=True).values():
        for name, value in fields_of(content) if isinstance(content, dict) else ():
            if name == "secretName":
                required.add(value)
            if name in ("credentials", "secretKeyRef") and not value.get("optional"):
                required.add(value["name"])
    steps = "\n".join(next_steps(target, d, tmp_path, True))
    assert required == set(re.findall(r"create secret generic (\S+)", steps))
    assert ("--open-metrics" in steps) is (target == "kserve" and not open_metrics)


@pytest.mark.parametrize("target", TARGETS)
def test_the_next_steps_say_what_no_index_has(
    target: str, repository: Path, tmp_path: Path
) -> None:
    """The tests' own packages are installed from the checkout."""
    d = describe_for(target, repository)
    assert "--vendor" in "\n".join(next_steps(target, d, tmp_path, False))
    d = replace(d, wheels={("llmserve", "0"): "llmserve-0-py3-none-any.whl"})
    assert "--vendor" not in "\n".join(next_steps(target, d, tmp_path, False))


@pytest.mark.parametrize("target", TARGETS)
def test_the_next_steps_build_no_image_that_has_a_digest(
    target: str, repository: Path, tmp_path: Path
) -> None:
    pushed = f"registry.example/pushed@sha256:{'0' * 64}"
    for gateway, builds in (("gateway:1", 1), (pushed, 0)):
        d = replace(describe_for(target, repository), image=pushed, gateway_image=gateway)
        steps = next_steps(target, d, tmp_path, True)
        assert sum("docker build" in step for step in steps) == builds
        assert not any(step.startswith("docker tag") for step in steps)


@pytest.mark.parametrize("target", ["compose", "kubernetes", "kserve"])
def test_dashboards_and_alerts_select_their_own_deployment(
    target: str, repository: Path, tmp_path: Path
) -> None:
    d = describe(repository, baked=True, name="mine")
    files = files_of(target, d, tmp_path, dashboard=True)
    queries = [
        str(value)
        for file in ("dashboard.json", "alerts.yaml")
        for name, value in fields_of(files[file])
        if name == "expr"
    ]
    selectors = {
        selector
        for query in queries
        for selector in re.findall(r'(?:vllm:|llmserve_|nv_)\w+(?:\{(job="\w+")?)?', query)
    }
    if target == "compose":  # There is no operator: Prometheus' own configuration names the job.
        assert selectors == {""}
        return
    assert selectors == {'job="mine"'}
    name = "base/podmonitor.yaml" if target == "kubernetes" else "podmonitor.yaml"
    monitor = files[name]["spec"]
    assert monitor["selector"]["matchLabels"] == {monitor["jobLabel"]: "mine"}


def test_a_pod_has_time_to_drain_and_triton_stops_last(repository: Path) -> None:
    d = describe(repository, baked=True, grace=77)
    pod = files_of("kubernetes", d, Path(), dashboard=False)["base/deployment.yaml"]
    spec = pod["spec"]["template"]["spec"]
    triton, gateway = spec["containers"]
    delay = int(gateway["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert gateway["command"][gateway["command"].index("--grace") + 1] == "77"
    assert spec["terminationGracePeriodSeconds"] >= delay + 77 + 5
    script = triton["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert script.startswith(f"sleep {delay}; while")
    assert str(gateway["ports"][0]["containerPort"]) in script


def test_the_command_of_triton_fits_the_models(repository: Path) -> None:
    assert describe(repository, baked=True).triton_command()[0] == "tritonserver"
    shell, option, command = describe(repository, baked=True, models=("b",)).triton_command()
    assert (shell, option) == ("sh", "-c")
    assert command.startswith(
        "mkdir -p /tmp/selected && ln -sf /models/b_generator /models/b /tmp/selected && "
        "exec tritonserver --model-repository=/tmp/selected "
    )
    (repository / "a" / "launch.sh").touch()
    (*_, command) = describe(repository, baked=True, models=("a",)).triton_command("/mnt/models")
    assert "exec sh /mnt/models/a/launch.sh /tmp/selected --" in command


@pytest.mark.parametrize("container", SERVERS)
def test_each_release_accepts_the_command_that_is_written_for_it(
    container: str, tmp_path: Path
) -> None:
    image = f"nvcr.io/nvidia/tritonserver:{container}-trtllm-python-py3"
    add_model(tmp_path, "a", image=image)
    triton = release(container)
    for models in ((), ("a",)):
        d = describe(tmp_path, baked=False, models=models)
        for host in ("", "127.0.0.1"):
            (*_, last) = command = d.triton_command(host=host)
            words = shlex.split(last) if models else command
            assert triton.refused(words) == []
            assert ("--grpc-address=127.0.0.1" in words) == (not triton.closes or bool(host))
        services = files_of("compose", d, tmp_path, dashboard=False)["compose.yaml"]["services"]
        gateway, server = services["gateway"], services["triton"]
        if triton.closes:
            assert "grpc://triton:8001" in gateway["command"]
            assert "network_mode" not in server
        else:
            # Nothing but the gateway can reach the loopback that Triton listens on.
            assert "grpc://127.0.0.1:8001" in gateway["command"]
            assert server["network_mode"] == "service:gateway"
            assert "depends_on" not in gateway, "each would wait for the other"


def test_an_image_that_names_a_release_is_that_release(repository: Path) -> None:
    older = describe(repository, baked=False, image="nvcr.io/nvidia/tritonserver:24.10-py3")
    assert older.triton.container == "24.10"
    assert release("24.10").refused(older.triton_command()) == []
    pushed = describe(repository, baked=False, image="registry.example/llmserve:1")
    assert pushed.triton == describe(repository, baked=False).triton


def test_a_dockerfile_of_ones_own_says_which_triton_it_has(repository: Path) -> None:
    for text, triton in (
        ("FROM nvcr.io/nvidia/tritonserver:24.10-py3", release("24.10")),
        (
            "ARG TAG=23.11-py3\nFROM nvcr.io/nvidia/tritonserver:${TAG} AS a\nFROM a",
            release("23.11"),
        ),
        ("FROM registry.example/mine:latest", UNKNOWN),
    ):
        (repository / "Dockerfile").write_text(f"# mine\n{text}\nRUN true\n")
        d = describe_for("compose", repository)
        assert d.triton == triton
        assert triton.refused(d.triton_command()) == []


def test_quantities_and_claims_of_kubernetes_are_accepted(repository: Path) -> None:
    wanted: list[dict[str, Any]] = [
        {"cpus": "0.5"}, {"cpus": "500m"}, {"memory": "1.5Gi"}, {"volume": "2024.models"}
    ]  # fmt: skip
    for more in wanted:
        describe(repository, baked=True, **more)


def test_weights_outside_the_repository_are_mounted_if_possible(tmp_path: Path) -> None:
    part = {"name": "g", "runtime": "m:C", "settings": {"path": "/weights/$x"}}
    add_model(tmp_path, "far", components={"generator": part})
    d = describe(tmp_path, baked=False)
    volumes = files_of("compose", d, tmp_path, dashboard=False)["compose.yaml"]
    mounted = [volume["target"] for volume in volumes["services"]["triton"]["volumes"]]
    assert "/weights/$$x" in mounted
    with pytest.raises(LLMServeError, match="--set weights=copy"):
        describe(tmp_path, baked=True)


@pytest.mark.parametrize("target", ["compose", "ray"])
def test_the_images_of_ours_need_no_index_with_vendor(
    target: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(packages: dict[str, str], folder: Path) -> None:
        for name, version in packages.items():
            (folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").write_text(name)

    # What really makes them is tested with `build --vendor`, and takes seconds.
    monkeypatch.setattr("llmserve_deploy.images.make_wheels", make)
    out = tmp_path / "out"
    words = [target, str(repository), "--out", str(out), "--vendor"]
    for _ in range(2):
        result = CliRunner().invoke(deploy, words)
        assert result.exit_code == 0, result.output
    wheels = sorted(path.name for path in out.glob("*.whl"))
    assert [wheel.split("-")[0] for wheel in wheels] == ["llmserve", "llmserve_gateway"]
    file = {"compose": "Dockerfile.gateway", "ray": "Dockerfile.ray"}[target]
    text = (out / file).read_text(encoding="utf-8")
    assert f"COPY {file} *.whl /wheels/" in text
    assert all(f" /wheels/{wheel}" in text for wheel in wheels)
    assert "llmserve==" not in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere has no models: create one with llmserve build"),
        (["R", "--model", "xyz"], "R has no model 'xyz': choose one of a, b"),
        (["R", "--name", "No"], "--name cannot be 'No': use up to 40 of a-z, 0-9 and -, a letter"),
        (["R", "--memory", "lots"], "--memory cannot be 'lots': use e.g. 8Gi"),
        (["R", "--memory", "8"], "--memory cannot be '8': use e.g. 8Gi"),
        (["R", "--cpus", "4Gi"], "--cpus cannot be '4Gi': use e.g. 2 or 500m"),
        (["GPU"], "e was built for a GPU, and --gpus is 0: use --gpus 2, or build it with"),
        (["R", "--out", "R/k8s"], "R/k8s is in the repository, where Triton treats every folder"),
        (["R", "--image", "a b"], "--image cannot be 'a b': use e.g. registry"),
        (["R", "--max-replicas", "1"], "--max-replicas 1 is less than --replicas 2: raise it"),
        (["MIXED"], "c needs a different image than the other models: deploy the models of one "
                    "image: --model c"),
        (["MIXED", "--model", "a", "--model", "c"], "a and c need different images: serve one: "),
        (["BROKEN"], "BROKEN/d/llmserve.json is damaged: build the model again"),
        (["R", "--out", "R"], "is not part of this deployment: name an empty folder with --out"),
        (["R", "--out", "plain/out"], "cannot write plain/out"),
    ],
)  # fmt: skip
def test_invalid_options_are_a_one_line_error_with_a_hint(
    words: list[str], error: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    repository.rename("R")
    shutil.copytree("R", "MIXED")
    add_model(Path("MIXED"), "c", image="nvcr.io/other:1")
    add_model(Path("MIXED"), "f", image="nvcr.io/other:2")
    (add_model(Path("BROKEN"), "d") / "llmserve.json").write_text("{")
    group = "instance_group { kind: KIND_GPU gpus: 1 }"
    (add_model(Path("GPU"), "e") / "config.pbtxt").write_text(group)
    Path("plain").touch()
    Path("R/Dockerfile").touch()
    if "--out" not in words:
        words = [*words, "--out", "out"]
    result = CliRunner().invoke(deploy, ["kubernetes", *words])
    assert isinstance(result.exception, LLMServeError | SystemExit), result.exc_info
    assert error in (str(result.exception) + result.output)
    assert not Path("out").exists()


def test_a_file_says_what_to_deploy_and_options_come_first(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llmserve.toml").write_text(
        'repository = "repository"\nmodels.b.source = "demo"\n'
        "[serve]\nreplicas = 3\ngrace = 7.5\nhttp_port = 1\n[gateway]\nno_auth = true\n",
        encoding="utf-8",
    )

    named = ("--config", "llmserve.toml")

    def triton_of(out: str, *words: str) -> tuple[Any, Any]:
        result = CliRunner().invoke(deploy, ["kubernetes", "--out", out, *words])
        assert result.exit_code == 0, result.exception
        text = Path(out, "base/deployment.yaml").read_text(encoding="utf-8")
        deployment = next(d for d in yaml.safe_load_all(text) if d["kind"] == "Deployment")
        containers = {c["name"]: c for c in deployment["spec"]["template"]["spec"]["containers"]}
        autoscaler = next(
            d
            for file in Path(out, "base").glob("*.yaml")
            for d in yaml.safe_load_all(file.read_text(encoding="utf-8"))
            if d and d["kind"] == "HorizontalPodAutoscaler"
        )
        gateway = next(c for name, c in containers.items() if "gateway" in name)
        return autoscaler["spec"]["minReplicas"], gateway["command"] + gateway.get("args", [])

    replicas, gateway = triton_of("out", *named)
    assert replicas == 3
    assert gateway[gateway.index("--grace") + 1] == "8"
    # What is open on one machine is not open to everyone.
    assert "--no-auth" not in gateway
    assert gateway[gateway.index("--model") + 1] == "b"
    replicas, gateway = triton_of("more", *named, "--replicas", "4", "--model", "a", "--model", "b")
    assert replicas == 4
    assert gateway.count("--model") == 2
    assert triton_of("here", "repository")[0] == 2, "what is named has nothing to do with the file"
    with Path("llmserve.toml").open("a", encoding="utf-8") as file:
        file.write('[models.new]\nsource = "demo"\n')
    for words, error in (
        (named, "new of llmserve.toml is not built: llmserve build --config llmserve.toml"),
        (["repository", "--config", "llmserve.toml"], "--config llmserve.toml says what to deploy"),
    ):
        result = CliRunner().invoke(deploy, ["compose", "--out", "none", *words])
        assert error in str(result.exception)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("volume", [[], ["--volume", "claim"]], ids=["image", "volume"])
def test_a_model_of_others_keeps_the_three_lines_that_declare_it(
    target: str, volume: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/own/1").mkdir(parents=True)
    Path("models/own/config.pbtxt").write_text('backend: "python"', encoding="utf-8")
    Path("llmserve.toml").write_text(
        'repository = "models"\n[models.own]\ninput = "PROMPT"\noutput = "ANSWER"\n',
        encoding="utf-8",
    )
    words = [target, "--out", "out", "--check", *(volume if target != "compose" else [])]
    result = CliRunner().invoke(deploy, words)
    assert result.exit_code == 0, result.output
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    written = " ".join("".join(path.read_text(encoding="utf-8") for path in files).split())
    if target == "ray":
        # Its application starts Triton as `serve` does.
        assert "texts: own: - PROMPT - ANSWER" in written
    else:
        where = "/mnt/models" if (target, bool(volume)) == ("kserve", True) else "/models"
        assert f"cat {where}/own/config.pbtxt; }} && printf" in written
        assert 'string_value: "PROMPT"' in written
    result = CliRunner().invoke(deploy, [target, "models", "--out", "plain"])
    assert result.exit_code == 0, result.output
    plain = [path for path in Path("plain").rglob("*") if path.is_file()]
    assert not any(b"PROMPT" in path.read_bytes() for path in plain), "nothing says so there"


def test_an_ensemble_of_others_is_deployed_with_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cut", "whole", "not asked for"):
        Path("models", name, "1").mkdir(parents=True)
        Path("models", name, "config.pbtxt").write_text('backend: "python"', encoding="utf-8")
    Path("models/whole/config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "cut" } }', encoding="utf-8"
    )
    Path("llmserve.toml").write_text(
        'repository = "models"\n[models.whole]\ninput = "PROMPT"\noutput = "ANSWER"\n',
        encoding="utf-8",
    )
    words = ["compose", "models", "--model", "whole", "--out", "out"]
    result = CliRunner().invoke(deploy, words)
    assert result.exit_code == 0, result.output
    written = Path("out/compose.yaml").read_text(encoding="utf-8")
    assert "/models/cut" in written
    assert written.index("/models/cut") < written.index("/models/whole")
    assert "not asked for" not in written


def test_edited_files_are_not_overwritten_and_nothing_is_deleted(
    repository: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["compose", str(repository), "--out", str(out)]

    def run(*more: str) -> Any:
        return CliRunner().invoke(deploy, [*words, *more])

    first = run()
    assert first.exit_code == 0, first.exception
    assert str(out / "compose.yaml") in first.stdout
    (out / "keys.json").touch()
    for left in (".git/config", "__pycache__/llmserve_ray.cpython-312.pyc"):
        (out / left).parent.mkdir()
        (out / left).touch()
    assert run().exit_code == 0
    path = out / "compose.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**content, "name": "mine"}), encoding="utf-8")
    assert "compose.yaml was changed, or written with other options" in str(run().exception)
    assert run("--force").exit_code == 0
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == content
    assert (out / "keys.json").exists()


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for target in TARGETS:
        with TemporaryDirectory() as scratch:
            for name, text in golden(target, Path(scratch)).items():
                (GOLDEN / target / name).parent.mkdir(parents=True, exist_ok=True)
                (GOLDEN / target / name).write_bytes(text)
