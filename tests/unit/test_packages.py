"""Commands that install something leave working what is installed where they are printed."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import packaging.requirements  # noqa: F401 - the tests hide what is installed
import pytest

from llmserve.packages import conflicts, origin, remedy
from llmserve.packages import install_command as command
from tests.site.blocks import pages
from tests.support import describe
from tests.trees import nodes_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own, with numpy 2 as pip installs it today."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    # Its pip is the first on the path.
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(pip.with_name("python")))
    monkeypatch.setenv("PATH", str(pip.parent))
    describe(tmp_path, "numpy", "2.4.6")
    describe(tmp_path, "llmserve", "0.2", requires=["numpy>=1.24"])
    return tmp_path


def test_without_the_embedded_triton_nothing_is_bounded(site: Path) -> None:
    assert command("llmserve-embed[compress]") == "pip install 'llmserve-embed[compress]'"
    assert remedy("ask its author") == "ask its author"


def test_beside_the_embedded_triton_numpy_stays_below_2(site: Path) -> None:
    describe(site, "nvidia-pytriton", "0.7.0", requires=["numpy<2.0.0,>=1.21"])
    assert command("nncf") == "pip install nncf 'numpy<2'"
    assert command("numpy<2") == "pip install 'numpy<2'"
    assert command("x", editable="y[test]") == "pip install -e 'y[test]' x 'numpy<2'"


def test_a_command_that_adds_the_embedded_triton_has_the_bound(site: Path) -> None:
    assert command("llmserve[embedded,test]") == "pip install 'llmserve[embedded,test]' 'numpy<2'"
    assert command("llmserve[constrained]") == "pip install 'llmserve[constrained]'"


def test_what_was_installed_for_numpy_2_is_chosen_anew(site: Path) -> None:
    """pip looks only at what it is asked for: without their names, these stay and are broken."""
    describe(site, "nvidia-pytriton", "0.7.0", requires=["numpy<2.0.0,>=1.21"])
    describe(site, "scipy", "1.18.1", requires=["numpy<2.9,>=2.0.0"])
    describe(site, "scikit_learn", "1.9", requires=["numpy>=1.24", "scipy>=1.10"])
    describe(site, "nncf", "3.4", requires=["scikit-learn>=0.24", "scipy>=1.3.2"])
    describe(site, "plots", requires=["numpy>=1.0", 'scipy>=9; extra == "more"'])
    assert command("numpy<2") == "pip install 'numpy<2' nncf scikit-learn scipy"
    assert command("nncf") == "pip install nncf 'numpy<2' scikit-learn scipy"


def test_a_conflict_is_found_and_named_with_what_mends_it(site: Path) -> None:
    describe(site, "nvidia-pytriton", "0.7.0", requires=["numpy<2.0.0,>=1.21"])
    describe(site, "broken", requires=["not a requirement!"])
    assert [str(found) for found in conflicts()] == [
        "nvidia-pytriton 0.7.0 needs numpy<2.0.0,>=1.21, and numpy 2.4.6 is installed"
    ]
    assert remedy("").endswith("and numpy 2.4.6 is installed: pip install 'numpy<2'")


def test_only_the_fields_of_metadata_count(site: Path) -> None:
    """A value may go on in an indented line, and a description may say anything."""
    describe(site, "tokenizers", "0.1")
    metadata = site / "folded-1.2.dist-info" / "METADATA"
    describe(site, "folded", requires=["tokenizers>=0.23,\n        <1"])
    license_field = "License: First,\n        \n        second.\n"
    metadata.write_text(
        license_field + metadata.read_text() + "\nRequires-Dist: tokenizers>=7\nName: other\n"
    )
    # The older form, whose METADATA is called otherwise.
    old = site / "old.egg-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old\nVersion: 3\n")
    (old / "requires.txt").write_text("tokenizers>=2\n")
    assert {str(found) for found in conflicts()} == {
        "folded 1.2 needs tokenizers<1,>=0.23, and tokenizers 0.1 is installed",
        "old 3 needs tokenizers>=2, and tokenizers 0.1 is installed",
    }


def test_what_an_extra_needs_counts_only_if_it_is_needed_without_it_too(site: Path) -> None:
    describe(site, "tokenizers", "0.1")
    markers = ['extra == "a"', 'extra == "a" or python_version > "3"', "python_version > '3'"]
    requires = [f"tokenizers>={n}; {marker}" for n, marker in enumerate(markers, 1)]
    describe(site, "some", requires=requires)
    assert [found.requires for found in conflicts()] == ["tokenizers>=2", "tokenizers>=3"]


def test_a_conflict_without_numpy_is_mended_by_pip_itself(site: Path) -> None:
    describe(site, "tokenizers", "0.1")
    describe(site, "transformers", "5.0", requires=["tokenizers>=0.23", "absent>=1"])
    needs = "transformers 5.0 needs tokenizers>=0.23, and tokenizers 0.1 is installed"
    assert remedy("") == f"{needs}: pip install transformers"


def test_from_a_clone_our_packages_come_from_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"url": ROOT.as_uri(), "dir_info": {"editable": True}})
    (site / "llmserve-0.2.dist-info" / "direct_url.json").write_text(text)
    monkeypatch.chdir(ROOT)
    assert command("llmserve-embed[compress]") == "pip install -e 'plugins/embed[compress]'"
    assert command("llmserve[constrained]") == "pip install -e '.[constrained]'"
    monkeypatch.chdir(tmp_path)
    assert command("llmserve-gateway") == f"pip install -e {ROOT}/plugins/gateway"
    # This one is not ours.
    assert command("llmserve-acme==1.0") == "pip install llmserve-acme==1.0"


def test_the_pip_of_another_environment_is_not_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command("x").startswith(f"{sys.executable} -m pip install x")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert command("x").startswith("pip install x")


COMMIT = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"
GIT = {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT}
SHA = "ab" * 32


@pytest.mark.parametrize(
    ("content", "url"),
    [
        ({"url": "https://github.com/a/b", "vcs_info": GIT}, f"git+https://github.com/a/b@{COMMIT}"),
        ({"url": "https://me:secret@git.example/b.git", "vcs_info": GIT, "subdirectory": "py"},
         f"git+https://git.example/b.git@{COMMIT}#subdirectory=py"),
        ({"url": "ssh://git@example.com/a/b", "vcs_info": GIT},
         f"git+ssh://git@example.com/a/b@{COMMIT}"),
        ({"url": "https://x.example/b-1.0.tar.gz", "archive_info": {"hash": f"sha256={SHA}"}},
         f"https://x.example/b-1.0.tar.gz#sha256={SHA}"),
        ({"url": "https://x.example/b.whl", "archive_info": {"hashes": {"sha256": SHA}}},
         f"https://x.example/b.whl#sha256={SHA}"),
        ({"url": "https://me:p@ss@x.example:8443/b.whl", "archive_info": {}},
         "https://x.example:8443/b.whl"),
        # A query can be a token.
        ({"url": "https://x.example/b.whl?X-Amz-Signature=abc", "archive_info": {}}, ""),
        # Only this machine has these; the last would be an instruction of its own.
        ({"url": "file:///src/b", "vcs_info": GIT}, ""),
        ({"url": "file:///src/b", "dir_info": {}}, ""),
        ({"url": "https://x.example/b.whl'\nRUN id", "archive_info": {}}, ""),
    ],
)  # fmt: skip
def test_a_package_that_is_from_no_index_says_where_from(
    site: Path, content: dict[str, object], url: str
) -> None:
    describe(site, "b", "5.24.0.dev0", origin=content)
    found = origin("b")
    assert found is not None
    assert found.url == url


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"url": 7}', '{"url": "http://[", "dir_info": {}}']
)
def test_a_damaged_origin_is_none(site: Path, text: str) -> None:
    describe(site, "b")
    (site / "b-1.2.dist-info" / "direct_url.json").write_text(text)
    assert origin("b") is None
    assert origin("numpy") is None
    assert origin("absent") is None


# In images, which have no embedded Triton.
IN_IMAGES = {"dockerfile.py", "images.py", "rayserve.py"}


def test_every_command_that_is_printed_is_composed_in_one_place() -> None:
    folders = (
        "llmserve",
        "cli",
        *(f"plugins/{path.parent.name}" for path in ROOT.glob("plugins/*/README.md")),
    )
    sources = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not {"tests", "examples", "scaffold"} & set(path.relative_to(ROOT).parts)
        and path.name not in IN_IMAGES
    ]
    assert len(sources) > 100
    for path in sources:
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "pip install" not in node.value, f"{path}: use install_command"


KEEPS_OLD_NUMPY = r"numpy<2|(?:llmserve|\.)\[embedded|-c constraints\.txt"


def test_a_page_that_installs_what_needs_numpy_keeps_it_below_2() -> None:
    found = []
    for page in pages():
        for line in page.read_text(encoding="utf-8").splitlines():
            commands = re.findall(r"pip install [^`#]*", line)
            for printed, name in (
                (c, n) for c in commands for n in re.findall(r"(?:llmserve-|plugins/)(\w+)", c)
            ):
                project = ROOT / "plugins" / name / "pyproject.toml"
                if project.is_file() and '"numpy' in project.read_text(encoding="utf-8"):
                    assert re.search(KEEPS_OLD_NUMPY, printed), f"{page}: {printed}"
                    found.append((name, page.stem))
    assert set(found) >= {
        ("bench", "README"),
        ("embed", "README"),
        ("embed", "retrieval"),
        ("openvino", "README"),
    }
