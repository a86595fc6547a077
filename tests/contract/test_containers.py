"""Which image serves which models if the models of a repository need different images."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_spec
from llmserve.builder.context import BuildContext, Container
from llmserve.builder.plan import BuildResult, BuildSpec
from llmserve.errors import ConfigError, UsageError
from llmserve.registry import Plugin, Registry
from llmserve.repository.dockerfile import BASE_IMAGE, IMAGE, groups, served_by
from llmserve.repository.manifest import Manifest
from llmserve.roles import Batching
from tests.live.servers import FREE_PORTS
from tests.support import replace_text, run

OWN = "example.com/engine:24.08"


def build(
    repository: Path, name: str, image: str | None = "", brings: tuple[str, ...] = ()
) -> BuildResult:
    """Build with a batching that names an image, as a plugin's component can."""

    def prepare(context: BuildContext) -> dict[str, object]:
        if image != "":
            context.container = Container(image, brings)
        return {}

    core = Registry.load()
    dynamic = core.get(Batching, "dynamic")
    own = Batching(
        name="own", summary="", runtime="llmserve.runtime.batch:BatchDriver", prepare=prepare,
        options=dynamic.options, inputs=dynamic.inputs,
    )  # fmt: skip
    entry = next(entry for entry in core.entries if entry.component is dynamic)
    core.entries.append(type(entry)(own, "batching", entry.plugin))
    assert isinstance(entry.plugin, Plugin)
    return build_spec(BuildSpec("hf", "demo", name, repository, batching="own"), registry=core)


def dockerfile(folder: Path) -> str:
    return (folder / "Dockerfile").read_text()


def lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(word)]


def test_models_that_agree_on_an_image_share_it(tmp_path: Path) -> None:
    build(tmp_path, "a", OWN, ("torch", "transformers"))
    result = build(tmp_path, "b", OWN, ("torch",))
    text = dockerfile(tmp_path)
    assert lines(text, "FROM") == ["FROM scratch AS wheels", f"FROM {OWN}"]
    assert "--model-repository=/models" in text
    assert "--model-control-mode" not in text
    assert "--no-deps" in text
    # A package that the image brings for one model is there for both and is not replaced.
    assert "transformers==" not in text
    assert "torch==" not in text
    # llmserve cannot be imported without it, and is installed without its dependencies.
    assert "pluggy==" in text
    assert result.dockerfile == tmp_path / "b" / "Dockerfile"
    assert result.docker_build == (
        f"docker build -t {IMAGE}-b -f {tmp_path}/b/Dockerfile {tmp_path}"
    )
    assert result.docker_run.endswith(f" {IMAGE}-b")


def test_the_repositorys_image_names_models_that_need_another(tmp_path: Path) -> None:
    own = build(tmp_path, "own", OWN, ("torch",))
    plain = build(tmp_path, "plain")
    text = dockerfile(tmp_path)
    assert lines(text, "FROM")[1] == f"FROM {BASE_IMAGE}"
    note = f"# own is not served by this image: it needs {OWN}.\n"
    assert f"{note}#     docker build -t {IMAGE}-own -f own/Dockerfile .\n" in text
    assert "--no-deps" not in text
    assert "torch==" in text
    assert "RUN mkdir -p /selected && ln -sf \\\n        /models/plain /selected\n" in text
    assert '"--model-repository=/selected"' in text
    # The image of `own` loads that model and none that it cannot serve.
    text = own.dockerfile.read_text()
    assert lines(text, "FROM")[1] == f"FROM {OWN}"
    assert "RUN mkdir -p /selected && ln -sf \\\n        /models/own /selected\n" in text
    assert plain.dockerfile == tmp_path / "Dockerfile"
    assert plain.docker_build == f"docker build -t {IMAGE} {tmp_path}"


def test_the_order_of_builds_makes_no_difference(tmp_path: Path) -> None:
    for name, image in (("x", OWN), ("y", "")):
        build(tmp_path / "one", name, image)
    for name, image in (("y", ""), ("x", OWN)):
        build(tmp_path / "two", name, image)
    assert dockerfile(tmp_path / "one") == dockerfile(tmp_path / "two")


def test_if_no_model_needs_the_plain_image_the_newest_serves_the_repository(tmp_path: Path) -> None:
    manifest = build(tmp_path, "a").manifest
    models = {
        name: replace(manifest, image=f"x:{tag}") for name, tag in (("a", "24.08"), ("b", "26.07"))
    }
    assert list(groups(models)[0]) == ["b"]
    assert list(groups({**models, "c": replace(manifest, image=None)})[0]) == ["b"]
    assert list(groups({**models, "mine": None})[0]) == ["b", "mine"]


def test_if_no_image_is_known_the_user_names_one(tmp_path: Path) -> None:
    result = build(tmp_path, "a", None)
    for text in (dockerfile(tmp_path), result.dockerfile.read_text()):
        assert lines(text, "ARG") == ["ARG IMAGE"]
        assert lines(text, "FROM")[1] == "FROM ${IMAGE}"
        assert text.index("ARG IMAGE") < text.index("FROM scratch")
    assert "--build-arg IMAGE=..." in result.docker_build


def test_a_model_that_llmserve_did_not_build_is_served_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.pbtxt").write_text('name: "mine"')
    build(tmp_path, "a", OWN)
    assert lines(dockerfile(tmp_path), "FROM")[1] == f"FROM {OWN}"
    build(tmp_path, "b")
    assert " \\\n        /models/mine /selected\n" in dockerfile(tmp_path)


def test_a_container_is_started_with_the_image_and_what_it_can_load(tmp_path: Path) -> None:
    build(tmp_path, "own", OWN)
    assert served_by(tmp_path, ()) == (IMAGE, ())
    build(tmp_path, "plain")
    assert served_by(tmp_path, ()) == (IMAGE, ("plain",))
    assert served_by(tmp_path, ("plain",)) == (IMAGE, ("plain",))
    assert served_by(tmp_path, ("own",)) == (f"{IMAGE}-own", ("own",))
    with pytest.raises(UsageError, match=r"plain and own need different images.*--model own"):
        served_by(tmp_path, ("plain", "own"))
    written = dockerfile(tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM mine\n")
    assert served_by(tmp_path, ()) == (IMAGE, ()), "the user's own image serves all models"
    (tmp_path / "Dockerfile").write_text(written)
    (tmp_path / "plain" / "llmserve.json").write_text("{")
    assert served_by(tmp_path, ()) == (IMAGE, ()), "a damaged manifest does not stop the others"


DOCKER = """#!/bin/sh
[ "$1" = version ] && echo 27 && exit
echo "$@" >> "$(dirname "$0")/calls"
exit 1
"""


def test_serve_looks_for_the_image_of_its_models_and_prints_how_to_build_it(tmp_path: Path) -> None:
    repository, tools = tmp_path / "r", tmp_path / "bin"
    tools.mkdir()
    (tools / "docker").write_text(DOCKER)
    (tools / "docker").chmod(0o755)
    build(repository, "own", OWN)
    build(repository, "plain")

    def serve_errors(*args: str) -> list[str]:
        path = f"{tools}:{os.environ['PATH']}"
        done = run("serve", str(repository), *args, "--runtime", "docker", *FREE_PORTS, PATH=path)
        return done.stderr.splitlines()

    assert serve_errors("--model", "own")[-1].endswith(
        f"there is no image {IMAGE}-own here: "
        f"docker build -t {IMAGE}-own -f {repository}/own/Dockerfile {repository}"
    )
    errors = serve_errors()
    assert errors[0] == f"llmserve: the image {IMAGE} serves only plain"
    assert errors[-1].endswith(f"docker build -t {IMAGE} {repository}")
    assert f"image inspect --format {{{{.Id}}}} {IMAGE}-own" in (tools / "calls").read_text()


@pytest.mark.parametrize("image", ["x\\nRUN curl", "$(id)", "a b", 7])
def test_an_image_that_would_be_an_instruction_is_refused(tmp_path: Path, image: object) -> None:
    build(tmp_path, "own", OWN)
    quoted = f'"{image}"' if isinstance(image, str) else str(image)
    replace_text(tmp_path / "own" / "llmserve.json", f'"{OWN}"', quoted)
    with pytest.raises(ConfigError, match="is damaged"):
        Manifest.read(tmp_path / "own")


def test_a_pip_that_is_too_old_for_the_option_ignores_its_variable() -> None:
    """Containers of 23.10 have such a pip; it ignores variables of options that do not exist."""
    env = {**os.environ, "PIP_NO_SUCH_OPTION": "1", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
