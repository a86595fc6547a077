"""Which image serves which models if the models of a repository need different images."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_spec
from llmserve.builder.context import BuildContext, Container
from llmserve.builder.plan import BuildResult, BuildSpec
from llmserve.contract.container import IMAGE, UNKNOWN, release
from llmserve.errors import ConfigError, UsageError
from llmserve.plugins.registry import Plugin, Registry
from llmserve.plugins.roles import Batching
from llmserve.repository.dockerfile import groups, image_for
from llmserve.repository.manifest import Manifest
from llmserve.repository.repository import Repository
from llmserve.testing.command import run
from tests.live.servers import FREE_PORTS
from tests.support import replace_text

pytestmark = pytest.mark.long

OWN = "example.com/engine:24.08"
NEWER = "example.com/engine:26.03"


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
        name="own", summary="", runtime="llmserve.runtime:BatchDriver", prepare=prepare,
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
    assert lines(text, "FROM") == [f"FROM {OWN}"]
    assert "--model-repository=/models" in text
    assert "--model-control-mode" not in text
    assert "--no-deps" in text
    # A package that the image brings for one model is there for both and is not replaced.
    assert "transformers==" not in text
    assert "torch==" not in text
    # llmserve cannot be imported without it, and is installed without its dependencies.
    assert "pluggy==" in text
    assert result.dockerfile == tmp_path / "Dockerfile"
    assert result.docker_build == f"docker build -t {IMAGE} {tmp_path}"
    assert result.docker_run.endswith(f" {IMAGE}")
    # NVIDIA's pages start these images with these limits.
    assert " --ulimit memlock=-1 --ulimit stack=67108864 " in result.docker_run


def test_an_image_with_an_engine_serves_the_other_models_with_packages_of_their_own(
    tmp_path: Path,
) -> None:
    build(tmp_path, "ensemble", OWN, ("torch", "transformers"))
    result = build(tmp_path, "llama_python")
    assert result.dockerfile == tmp_path / "Dockerfile"
    assert result.docker_build == f"docker build -t {IMAGE} {tmp_path}"
    text = dockerfile(tmp_path)
    assert lines(text, "FROM") == [f"FROM {OWN}"]
    shared, own = re.findall(r"pip install (?:.*\\\n)+.*", text)
    assert "--no-deps" in shared
    assert "torch==" not in shared
    assert "transformers==" not in shared
    # pip replaces nothing that the image has, because these are put into a folder.
    assert "--target /opt/llmserve/packages" in own
    assert "--no-deps" not in own
    assert "torch==" in own
    assert "transformers==" in own
    assert 'LLMSERVE_OWN_MODELS="llama_python"' in text
    assert "--load-model" not in text
    assert served_by(tmp_path, ()) == (IMAGE, ())
    # NVIDIA's images with an engine have none of the other backends.
    manifests = {name: Manifest.read(tmp_path / name) for name in ("ensemble", "llama_python")}
    assert manifests["llama_python"] is not None
    exported = replace(manifests["llama_python"], backends=["onnxruntime"])
    served, others = groups({**manifests, "exported": exported})
    assert list(served) == ["llama_python", "exported"]
    assert list(others) == ["ensemble"]
    assert served_by(tmp_path, ("ensemble", "llama_python")) == (
        IMAGE, ("ensemble", "llama_python"),
    )  # fmt: skip


def test_the_repositorys_image_names_models_that_need_another(tmp_path: Path) -> None:
    own = build(tmp_path, "own", OWN, ("torch",))
    newer = build(tmp_path, "newer", NEWER)
    text = dockerfile(tmp_path)
    assert lines(text, "FROM") == [f"FROM {NEWER}"]
    note = f"# own is not served by this image: it needs {OWN}.\n"
    assert f"{note}#     docker build -t {IMAGE}-own -f own/Dockerfile .\n" in text
    assert "RUN mkdir -p /selected && ln -sf \\\n        /models/newer /selected\n" in text
    assert '"--model-repository=/selected"' in text
    # The image of `own` loads that model and none that it cannot serve.
    text = (tmp_path / "own" / "Dockerfile").read_text()
    assert lines(text, "FROM") == [f"FROM {OWN}"]
    assert "RUN mkdir -p /selected && ln -sf \\\n        /models/own /selected\n" in text
    assert newer.docker_build == f"docker build -t {IMAGE} {tmp_path}"
    again = build(tmp_path, "own", OWN, ("torch",))
    assert again.dockerfile == tmp_path / "own" / "Dockerfile"
    assert own.docker_build == f"docker build -t {IMAGE} {tmp_path}"
    assert again.docker_build == (
        f"docker build -t {IMAGE}-own -f {tmp_path}/own/Dockerfile {tmp_path}"
    )
    assert again.docker_run.endswith(f" {IMAGE}-own")


def test_the_order_of_builds_makes_no_difference(tmp_path: Path) -> None:
    for name, image in (("x", OWN), ("y", ""), ("z", NEWER)):
        build(tmp_path / "one", name, image)
    for name, image in (("z", NEWER), ("y", ""), ("x", OWN)):
        build(tmp_path / "two", name, image)
    assert dockerfile(tmp_path / "one") == dockerfile(tmp_path / "two")


def test_the_newest_image_serves_the_repository(tmp_path: Path) -> None:
    manifest = build(tmp_path, "a").manifest
    models = {
        name: replace(manifest, image=f"x:{tag}") for name, tag in (("a", "24.08"), ("b", "26.07"))
    }
    assert list(groups(models)[0]) == ["b"]
    assert list(groups({**models, "c": replace(manifest, image=None)})[0]) == ["b"]
    assert list(groups({**models, "mine": None})[0]) == ["b", "mine"]
    assert list(groups({**models, "plain": replace(manifest, image="")})[0]) == ["b", "plain"]
    unknown = {"a": replace(manifest, image=None), "b": replace(manifest, image="")}
    assert list(groups(unknown)[0]) == ["b"], "an image that is known can be built"


def served_by(repository: Path, models: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    image = image_for(Repository.open(repository), models)
    return image.name, image.models


def test_if_no_image_is_known_the_user_names_one(tmp_path: Path) -> None:
    result = build(tmp_path, "a", None)
    for text in (dockerfile(tmp_path), result.dockerfile.read_text()):
        assert lines(text, "ARG") == ["ARG IMAGE"]
        assert lines(text, "FROM") == ["FROM ${IMAGE}"]
        assert text.index("ARG IMAGE") < text.index("FROM ")
    assert "--build-arg IMAGE=..." in result.docker_build
    written = dockerfile(tmp_path)
    (tmp_path / "Dockerfile").write_text(written.partition("\n")[2])
    assert "--build-arg IMAGE=..." in build(tmp_path, "a", None).docker_build, (
        "it is the user's own"
    )


def test_a_model_that_llmserve_did_not_build_is_served_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.pbtxt").write_text('name: "mine"')
    build(tmp_path, "a", OWN)
    assert lines(dockerfile(tmp_path), "FROM") == [f"FROM {OWN}"]
    build(tmp_path, "b", NEWER)
    assert " \\\n        /models/mine /selected\n" in dockerfile(tmp_path)


def test_a_container_is_started_with_the_image_and_what_it_can_load(tmp_path: Path) -> None:
    build(tmp_path, "own", OWN)
    assert served_by(tmp_path, ()) == (IMAGE, ())
    build(tmp_path, "newer", NEWER)
    assert served_by(tmp_path, ()) == (IMAGE, ("newer",))
    assert served_by(tmp_path, ("newer",)) == (IMAGE, ("newer",))
    assert served_by(tmp_path, ("own",)) == (f"{IMAGE}-own", ("own",))
    with pytest.raises(UsageError, match=r"newer and own need different images.*--model own"):
        served_by(tmp_path, ("newer", "own"))
    written = dockerfile(tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM mine\n")
    assert served_by(tmp_path, ()) == (IMAGE, ()), "the user's own image serves all models"
    assert image_for(Repository.open(tmp_path), ()).triton is UNKNOWN
    (tmp_path / "Dockerfile").write_text("ARG TAG=24.10\nFROM nvcr.io/x:${TAG}-py3 AS a\nFROM a\n")
    assert image_for(Repository.open(tmp_path), ()).triton == release("24.10")
    (tmp_path / "Dockerfile").write_text(written)
    (tmp_path / "newer" / "llmserve.json").write_text("{")
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
    build(repository, "newer", NEWER)

    def serve_errors(*args: str) -> list[str]:
        path = f"{tools}:{os.environ['PATH']}"
        done = run("serve", str(repository), *args, "--runtime", "docker", *FREE_PORTS, PATH=path)
        return done.stderr.splitlines()

    assert serve_errors("--model", "own")[-1].endswith(
        f"there is no image {IMAGE}-own here: "
        f"docker build -t {IMAGE}-own -f {repository}/own/Dockerfile {repository}"
    )
    errors = serve_errors()
    assert errors[0] == f"llmserve: the image {IMAGE} serves only newer"
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
