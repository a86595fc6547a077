"""Every line of pip in an emitted Dockerfile can be done with the Python of its image.

pip is asked, with an index, and only resolves: what it needs of most packages is their metadata.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve import __version__
from llmserve.builder.build import build_spec
from llmserve.builder.context import BuildContext, Container
from llmserve.builder.plan import BuildSpec, make_plan, needed_packages
from llmserve.contract.container import LAST_RELEASES, PLAIN, PYTHONS, SERVERS, python_in
from llmserve.errors import IncompatibleError
from llmserve.names import normal
from llmserve.packages import python_of, runs_with
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Batching, Recipe
from llmserve.repository.dockerfile import groups, of_repository
from llmserve.repository.manifest import Manifest
from llmserve.repository.wheels import make_wheels, wheels_in
from llmserve_deploy.description import describe
from llmserve_deploy.targets import files_of

TRTLLM = "nvcr.io/nvidia/tritonserver:{}-trtllm-python-py3"
VLLM = "nvcr.io/nvidia/tritonserver:{}-vllm-python-py3"
OLD = TRTLLM.format("23.10")
MODEL = Manifest("m", "", "", "", {}, {}, {}, {}, {}, False, "")
ENGINE = replace(MODEL, name="engine", image=OLD, packages={"llmserve": __version__})
LATER = replace(MODEL, name="later", packages={"x": "1"}, pythons={"x": ">=3.11"})
_SECONDS = 240


def of_recipe(recipe: Recipe, registry: Registry) -> Manifest:
    """The manifest of a model, as far as it decides what is installed for it."""
    packages = needed_packages(make_plan(BuildSpec(recipe.name, "demo", "m"), registry))
    pythons = {name: python_of(name) for name in packages}
    return replace(MODEL, name=recipe.name, packages=packages, pythons=pythons)


def models_of_recipes() -> dict[str, Manifest]:
    """A model of each recipe of ours that the plain image, or an engine's as a guest, serves."""
    registry = Registry.load()
    recipes = [r for r in registry.all(Recipe) if r.name not in ("trtllm", "vllm")]
    return {recipe.name: of_recipe(recipe, registry) for recipe in recipes}


def test_an_image_has_the_python_of_its_release() -> None:
    assert {python_in(TRTLLM.format(tag)) for tag in SERVERS} == PYTHONS
    assert python_in(TRTLLM.format("24.11")).startswith("3.10.")
    assert python_in(VLLM.format("24.11")).startswith("3.12.")
    assert python_in("example.com/mine:latest") == python_in(None) == ""
    assert not runs_with(">=3.11.0", python_in(OLD))
    assert runs_with(">=3.10.0", python_in(OLD))


def test_a_guest_gets_the_last_release_for_the_python_of_its_image() -> None:
    last = LAST_RELEASES["3.10"]["transformers"]
    guest = replace(
        MODEL, name="guest", packages={"torch": "2.13.0", "transformers": "5.99.0"},
        pythons={"transformers": ">=3.11.0"},
    )  # fmt: skip
    text = of_repository({"engine": ENGINE, "guest": guest}, "guest")
    assert f"transformers=={last}" in text
    assert "5.99.0 " not in text
    assert f"# transformers {last} is the last for the Python 3.10.12 of this image" in text
    newer = replace(ENGINE, image=TRTLLM.format("26.07"))
    assert "transformers==5.99.0" in of_repository({"engine": newer, "guest": guest}, "guest")
    fits = replace(guest, packages={"transformers": "5.1.0"}, pythons={})
    assert "transformers==5.1.0" in of_repository({"engine": ENGINE, "guest": fits}, "guest")


def test_numpy_stays_below_2_as_in_nvidias_images() -> None:
    guest = replace(MODEL, name="guest", packages={"numpy": "2.4.1", "torch": "2.13.0"})
    for image in (OLD, TRTLLM.format("24.10"), TRTLLM.format("26.07")):
        models = {"engine": replace(ENGINE, image=image), "guest": guest}
        shared, own = lines_of_pip(of_repository(models, "guest"))
        assert "numpy<2" in own
        assert "numpy==2.4.1" not in own
        assert "numpy<2" not in shared, "what an image brings is not replaced"
    (plain,) = lines_of_pip(of_repository({"guest": guest}, "guest"))
    assert "numpy<2" in plain


def test_a_model_that_an_images_python_cannot_have_is_not_its_guest() -> None:
    served, others = groups({"engine": ENGINE, "later": LATER})
    assert list(served) == ["later"]
    assert list(others) == ["engine"]
    newer = replace(ENGINE, image=TRTLLM.format("24.12"))
    assert list(groups({"engine": newer, "later": LATER})[0]) == ["engine", "later"]


def test_a_build_for_an_image_whose_python_is_too_old_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site" / "needs_later-1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: needs-later\nVersion: 1.0\nRequires-Python: >=3.11\n"
    )
    monkeypatch.syspath_prepend(str(site.parent))
    registry = Registry.load()
    dynamic = registry.get(Batching, "dynamic")

    def prepare(context: BuildContext) -> dict[str, object]:
        context.container = Container(OLD)
        return {}

    own = replace(dynamic, name="own", requires=("needs-later",), prepare=prepare)
    entry = next(entry for entry in registry.entries if entry.component is dynamic)
    registry.entries.append(type(entry)(own, "batching", entry.plugin))
    spec = BuildSpec("hf", "demo", "m", tmp_path / "r", batching="own")
    problem = f"needs-later 1.0 needs Python >=3.11, and the image {OLD} has 3.10.12"
    with pytest.raises(IncompatibleError, match=re.escape(problem)):
        build_spec(spec, registry=registry)
    assert not (tmp_path / "r").exists()


def lines_of_pip(dockerfile: str) -> list[list[str]]:
    """The arguments of each ``pip install`` of a Dockerfile."""
    commands = re.findall(r"^RUN (.*)$", dockerfile.replace("\\\n", " "), re.MULTILINE)
    words = [shlex.split(command) for command in commands if "pip install " in command]
    return [line[line.index("install") + 1 :] for line in words]


def resolve(dockerfile: str, python: str, wheels: Path, target: Path) -> list[dict[str, str]]:
    """Return what pip would install for each line, by names, with this Python."""
    found = []
    for number, line in enumerate(lines_of_pip(dockerfile)):
        report = target / f"{number}.json"
        arguments = [
            word.replace("/wheels", str(wheels)) if word.startswith("/wheels") else word
            for word in line
        ]
        if "--target" in arguments:
            at = arguments.index("--target")
            del arguments[at : at + 2]
        command = [
            sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet",
            "--python-version", python, "--only-binary=:all:",
            "--target", str(target / "none"), "--report", str(report), *arguments,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert done.returncode == 0, (line, done.stderr[-2000:])
        installed = [row["metadata"] for row in json.loads(report.read_text())["install"]]
        found.append({normal(row["name"]): row["version"] for row in installed})
    return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of our packages, which are on no index."""
    names = {name for model in models_of_recipes().values() for name in model.packages}
    ours = {name for name in names if name.startswith("llmserve")}
    ours |= {"llmserve-trtllm", "llmserve-gateway"}
    folder = tmp_path_factory.mktemp("wheels")
    make_wheels(dict.fromkeys(sorted(ours), __version__), folder)
    return folder


@pytest.fixture(scope="module")
def index() -> None:
    """An index that pip reaches; without one nothing can be found, and nothing is said."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "pluggy"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--dest", folder], check=False, timeout=_SECONDS)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip("pip reaches no index")


# The plain one, the oldest and the newest: pip takes half a minute for each.
IMAGES = [PLAIN, OLD, VLLM.format("26.08")]


@pytest.mark.long
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("image", IMAGES)
def test_pip_finds_all_that_a_dockerfile_asks_for(image: str, wheels: Path, tmp_path: Path) -> None:
    models = models_of_recipes()
    if image != PLAIN:
        # Graphs need a backend that images of engines do not have.
        models = {name: m for name, m in models.items() if "onnxruntime" not in m.packages}
        brought = ("transformers", "torch", "numpy")
        packages = {"llmserve": __version__, "llmserve-trtllm": __version__, "pluggy": "1.5.0"}
        models["engine"] = replace(ENGINE, image=image, packages=packages, brought=brought)
    text = of_repository(models, "hf", wheels_in(wheels))
    installed = resolve(text, python_in(image), wheels, tmp_path)
    assert len(installed) == (1 if image == PLAIN else 2)
    assert installed[-1]["numpy"].startswith("1.")
    assert {"torch", "transformers", "openvino"} <= installed[-1].keys()


@pytest.mark.long
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("target", "file"), [("compose", "Dockerfile.gateway"), ("ray", "Dockerfile.ray")]
)
def test_pip_finds_all_that_the_images_of_a_deployment_ask_for(
    target: str, file: str, wheels: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    (repository / "m").mkdir(parents=True)
    (repository / "m" / "config.pbtxt").touch()
    replace(MODEL, recipe="hf").write(repository / "m")
    gateway_image = "llmserve-ray" if target == "ray" else "llmserve-gateway"
    d = describe(repository, baked=target == "ray", gateway_image=gateway_image)
    d = replace(d, wheels=wheels_in(wheels))
    text = str(files_of(target, d, tmp_path / "out", dashboard=False)[file])
    image = re.search(r"(?m)^FROM (\S+)$", text)
    assert image
    # That of Python itself has its version in its name.
    python = python_in(image[1]) or image[1].partition(":")[2].removesuffix("-slim")
    (installed,) = resolve(text, python, wheels, tmp_path)
    assert {"llmserve", "llmserve-gateway"} <= installed.keys()
    assert ("ray" in installed) == (target == "ray")
