"""`build --vendor` puts wheels beside the Dockerfile; what no index has is pinned by its source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llmserve import __version__
from llmserve.errors import PluginError
from llmserve.repository.wheels import fits_any_python, make_wheels, place, wheels_in
from llmserve.testing.command import run
from tests.support import describe, install, with_path

pytestmark = pytest.mark.long

LLMSERVE = f"llmserve-{__version__}-py3-none-any.whl"
HF = f"llmserve_hf-{__version__}-py3-none-any.whl"
DEPENDENCIES = str(Path(pytest.__file__).parents[1])


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that was built with the wheels of this checkout."""
    repository = tmp_path_factory.mktemp("vendored") / "r"
    built = run(
        "build", "--plugin", "hf", "--model", "demo", "--output", str(repository), "--vendor"
    )
    assert built.returncode == 0, built.stderr
    return repository


@pytest.fixture(scope="module")
def fresh(vendored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which only the wheels are installed, without an index."""
    venv = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    wheels = [str(path) for path in vendored.glob("*.whl")]
    subprocess.run([*pip, "--no-index", "--no-deps", *wheels], check=True)
    return python


def in_fresh(python: Path, code: str, *arguments: str) -> str:
    """Run code there; the dependencies are those of this environment, without what is editable."""
    env = {**os.environ, "PYTHONPATH": DEPENDENCIES}
    command = [str(python), "-c", code, *arguments]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


USE = """
import llmserve, llmserve_hf, llmserve_cli.main
from pathlib import Path
from llmserve.demo import demo_model_path
from llmserve.plugins.registry import Registry
for module in (llmserve, llmserve_hf, llmserve_cli.main):
    assert "/fresh" in module.__file__, module.__file__
assert (demo_model_path() / "model.safetensors").is_file()
print(llmserve.__version__, Registry.load().recipe("hf").name)
"""


def test_the_wheels_beside_the_dockerfile_are_all_that_an_image_needs_of_ours(
    vendored: Path, fresh: Path
) -> None:
    assert sorted(path.name for path in vendored.iterdir()) == ["Dockerfile", "demo", LLMSERVE, HF]
    assert in_fresh(fresh, USE) == f"{__version__} hf"
    assert (fresh.parent / "llmserve").is_file()
    text = (vendored / "Dockerfile").read_text()
    assert "# Installed from the wheels beside this file:\n#     llmserve, llmserve-hf\n" in text
    assert f"/wheels/{LLMSERVE} " in text
    assert "llmserve==" not in text
    assert "COPY Dockerfile *.whl /wheels/\n" in text
    # Triton treats every folder as a model, and ignores files.
    assert run("check", str(vendored)).returncode == 0


PACK = """
import sys
from pathlib import Path
from llmserve.repository.wheels import make_wheels
make_wheels({"llmserve": sys.argv[2], "llmserve-hf": sys.argv[2]}, Path(sys.argv[1]))
"""


def test_what_is_installed_is_packed_as_the_wheel_that_it_came_from(
    vendored: Path, fresh: Path, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        in_fresh(fresh, PACK, str(tmp_path / folder), __version__)
    for name in (LLMSERVE, HF):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        before, after = (
            {
                entry.filename: archive.read(entry)
                for entry in archive.infolist()
                if not entry.filename.endswith("/RECORD")
            }
            for archive in map(zipfile.ZipFile, (vendored / name, tmp_path / "one" / name))
        )
        assert before == after


def test_a_later_build_replaces_wheels_and_names_those_that_are_missing(vendored: Path) -> None:
    old = "llmserve_hf-0.0.1-py3-none-any.whl"
    (vendored / HF).rename(vendored / old)
    text = (vendored / "Dockerfile").read_text()
    build = ("build", "--plugin", "hf", "--model", "demo", "--output", str(vendored), "--verbose")
    plain = run(*build)
    assert "      (--vendor brings llmserve-hf, unless an index has them)" in plain.stderr
    without = (vendored / "Dockerfile").read_text()
    assert "# Installed here from a folder, which no image has:\n#     llmserve-hf\n" in without
    assert "`llmserve build --vendor` does." in without
    assert f"llmserve-hf=={__version__}" in without
    assert run(*build, "--vendor").returncode == 0
    assert (vendored / "Dockerfile").read_text() == text
    assert not (vendored / old).exists()


def test_an_installed_third_party_plugin_is_packed_with_its_scripts_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib" / "site"
    install(site, "llmserve-acme", "[console_scripts]\nacme = acme:main\n", acme="WORDS = 'ß'\n")
    info = site / "llmserve_acme-1.2.dist-info"
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py2-none-any\nTag: py3-none-any\n")
    (info / "INSTALLER").write_text("pip\n")
    for path in ("bin/acme", "bin/acme-tool", "share/acme/words.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    names = ["acme.py", *(f"{info.name}/{path.name}" for path in info.iterdir())]
    names += ["../../bin/acme", "../../bin/acme-tool", "../../share/acme/words.txt"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, f"{info.name}/RECORD")))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert fits_any_python("llmserve-acme")
    make_wheels({"llmserve-acme": "1.2"}, tmp_path / "wheels")
    (file,) = wheels_in(tmp_path / "wheels").values()
    assert file == "llmserve_acme-1.2-py2.py3-none-any.whl"
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command = [*pip, "--prefix", str(target), str(tmp_path / "wheels" / file)]
    subprocess.run(command, check=True)
    assert (target / "bin" / "acme-tool").read_text() == "bin/acme-tool"
    assert "from acme import main" in (target / "bin" / "acme").read_text()
    assert (target / "share" / "acme" / "words.txt").is_file()
    (site / "acme.py").unlink()
    with pytest.raises(PluginError, match=r"llmserve-acme lacks its file acme\.py"):
        make_wheels({"llmserve-acme": "1.2"}, tmp_path / "wheels")


def test_what_cannot_be_a_wheel_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fits_any_python("numpy")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    describe(tmp_path, "debs")
    with pytest.raises(PluginError, match="debs was not installed by pip"):
        make_wheels({"debs": "1.2"}, tmp_path / "wheels")
    gone = {"url": (tmp_path / "gone").as_uri(), "dir_info": {"editable": True}}
    describe(tmp_path, "gone", origin=gone)
    with pytest.raises(PluginError, match="the wheel of gone cannot be built from"):
        make_wheels({"gone": "1.2"}, tmp_path / "wheels")


def test_names_of_files_that_are_no_wheels_get_nowhere(tmp_path: Path) -> None:
    for name in (
        "a b-1.0-py3-none-any.whl",
        "a-1.0'-py3-none-any.whl",
        "a.whl",
        "$(id)-1-a-b-c.whl",
    ):
        (tmp_path / name).touch()
    assert wheels_in(tmp_path) == {}
    assert wheels_in(tmp_path / "absent") == {}
    place(tmp_path / "absent", tmp_path)


COMMIT = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"
GIT = {
    "url": "https://github.com/huggingface/transformers",
    "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT},
}


def test_a_package_from_git_is_pinned_by_its_commit(tmp_path: Path) -> None:
    """A model of today may need a transformers of today, which no index has."""
    site = tmp_path / "site"
    describe(site, "transformers", "5.24.0.dev0", origin=GIT)
    describe(site, "accelerate", "9.9.dev0", origin={"url": "file:///src/a", "dir_info": {}})
    env = with_path(site)
    output = str(tmp_path / "r")
    built = run("build", "--plugin", "hf", "--model", "demo", "--output", output, env=env)
    assert built.returncode == 0, built.stderr
    address = f"git+https://github.com/huggingface/transformers@{COMMIT}"
    manifest = json.loads((tmp_path / "r" / "demo" / "llmserve.json").read_text())
    assert manifest["packages"]["transformers"] == "5.24.0.dev0"
    assert manifest["origins"] == {"transformers": address}
    text = (tmp_path / "r" / "Dockerfile").read_text()
    assert f"'transformers @ {address}'" in text
    assert "transformers==" not in text
    # A folder of this machine is no address for another one.
    assert "accelerate" in text.split("which no image has:")[1].split("\n")[1]
    assert "RUN command -v git" in text
    missing = run("check", output, env=with_path())
    assert "it was built with transformers 5.24.0.dev0" in missing.stdout + missing.stderr
