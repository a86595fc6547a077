"""The site has a page for each command, option, tensor, metric and hook."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.plan import known_options
from llmserve.contract import bounded_json
from llmserve.contract.images import MAX_IMAGE_MB, MAX_IMAGES, MAX_MEGAPIXELS
from llmserve.contract.options import DEFAULT_LENGTH, MAX_LOGPROBS, OPTIONS
from llmserve.plugins import hookspecs
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Recipe
from llmserve.runtime.answer import images
from llmserve_gateway import bodies
from llmserve_gateway.admission import Limits
from llmserve_gateway.batches import routes
from llmserve_gateway.serving import Listening
from llmserve_gateway.text_requests import MAX_ANSWERS
from llmserve_gateway.value_requests import MAX_TEXTS
from tests.site.generated import EXIT_CODES, all_commands, as_markdown, other_parts
from tests.site.pages import DOCS, GUIDE, ROOT, all_pages, guide, slug, with_links
from tests.site.search import FINDS

CODE = [
    path
    for folder in ("llmserve", "plugins/gateway/llmserve_gateway")
    for path in (ROOT / folder).rglob("*.py")
]


def test_each_command_and_its_options_have_a_page() -> None:
    page = all_pages()["reference/commands.md"]
    names = [path for path, _ in all_commands()]
    assert {"llmserve serve", "llmserve plugin new", "llmserve deploy kubernetes"} <= {*names}
    for path, command in all_commands():
        section = page.split(f"\n## {path}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
                assert all(name in section for name in parameter.opts), (path, parameter.opts)


def test_the_guide_to_the_commands_names_all_and_their_exit_codes() -> None:
    text = (DOCS / "guides" / "commands.md").read_text(encoding="utf-8")
    examples = {
        f"llmserve {path.parent.name}" for path in ROOT.glob("plugins/examples/*/README.md")
    }
    tops = {path for path, _ in all_commands() if path.count(" ") == 1} - examples
    named = {
        word for row in re.findall(r"(?m)^\| (`[^|]*)\|", text) for word in row.split("`")[1::2]
    }
    firsts = {name.removeprefix("llmserve ").split()[0] for name in named}
    assert {path.removeprefix("llmserve ") for path in tops} <= firsts
    listed = re.search(r"Exit codes: (.*?)\.\n", text, re.DOTALL)
    assert listed is not None
    assert {int(n) for n in re.findall(r"\d+", listed[1])} == {*EXIT_CODES}


def test_each_option_of_a_recipe_has_a_page() -> None:
    page, registry = all_pages()["reference/plugin-options.md"], Registry.load()
    for recipe in registry.all(Recipe):
        section = page.split(f"\n## {recipe.name}\n")[1].split("\n## ")[0]
        assert all(f"| `{o.name}` |" in section for o in known_options(recipe, registry))
    others = [part for _, part in other_parts(registry)]
    assert "sequence-oldest" in {part.name for part in others}
    for part in others:
        section = page.split(f"\n## {part.name}\n")[1].split("\n## ")[0]
        assert all(f"| `{option.name}` |" in section for option in part.options)


def test_each_tensor_has_a_page() -> None:
    contract = (ROOT / "llmserve" / "contract" / "tensors.py").read_text(encoding="utf-8")
    names = re.findall(r'Tensor\("(\w+)"', contract)
    assert len(names) > 8
    assert all(f"`{name}`" in all_pages()["reference/tensors.md"] for name in names)
    options = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in options for name in OPTIONS)


def test_each_metric_has_a_page() -> None:
    sources = [path for path in CODE if path.name == "metrics.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    # The gateway writes the seconds of its histograms after names of their own.
    names = {*re.findall(r'"((?:vllm:|llmserve_)\w+)"', text)}
    names |= {f"vllm:{name}_seconds" for name in re.findall(r'= seconds\(\s*"(\w+)"', text)}
    assert len(names) > 20
    assert [n for n in sorted(names) if f"`{n}`" not in all_pages()["reference/metrics.md"]] == []


def test_each_hook_has_a_page() -> None:
    hooks = [name for name in vars(hookspecs) if name.startswith("llmserve_")]
    assert len(hooks) > 8
    assert all(f"write/{hook}.md" in guide() for hook in hooks)


def test_each_public_name_of_python_has_a_page() -> None:
    listed = (ROOT / "llmserve" / "api.txt").read_text(encoding="utf-8").splitlines()[1:]
    whole = "".join(text for uri, text in all_pages().items() if "/python/" in uri)
    assert len(listed) > 300
    names = [re.split(r"[^\w.]", line)[0] for line in listed]
    found = {*re.findall(r"(?m)^(?:      heading: |## )(llmserve\S+)$", whole)}
    assert found == {*names}


def test_docstrings_are_read_as_markdown() -> None:
    text = "Uses :class:`~a.B`::\n\n    x = 1\n\n>>> f(1)\n['', '!']\n\nDone."
    fenced = "```pycon\n>>> f(1)\n['', '!']\n```"
    assert as_markdown(text) == f"Uses `a.B`:\n\n    x = 1\n\n{fenced}\n\nDone."


def test_the_guide_is_cut_without_loss() -> None:
    whole = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```.*?^```$", whole)
    cut = "".join(text for _, text in guide().values())
    assert re.findall(r"(?ms)^```.*?^```$", cut) == blocks
    assert all(re.match(r"# \S", text) for _, text in guide().values())


NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def links(text: str) -> Iterator[str]:
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    return (target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target)


def own_pages() -> dict[str, str]:
    """Those that lie in docs, as the site shows them."""
    found = sorted(DOCS.rglob("*.md"))
    paths = {path.relative_to(DOCS).as_posix(): path for path in found}
    return {
        uri: with_links(path.read_text(encoding="utf-8"), path, uri) for uri, path in paths.items()
    }


def test_links_lead_to_pages() -> None:
    pages: dict[str, Any] = {**own_pages(), **all_pages()}
    for uri, text in pages.items():
        for target in links(text):
            name, _, anchor = target.partition("#")
            path = (DOCS / uri).parent / name if name else DOCS / uri
            relative = path.resolve().relative_to(DOCS).as_posix()
            if relative not in pages:
                assert path.is_file() or relative.endswith(".png"), (uri, target)
            elif anchor:
                anchors = map(slug, re.findall(r"(?m)^#+ (.+)$", pages[relative]))
                assert anchor in anchors, (uri, target)


def test_links_of_our_pages_also_work_in_the_repository() -> None:
    """``docs`` is read there as well, where generated pages are not."""
    for path in DOCS.rglob("*.md"):
        for target in links(path.read_text(encoding="utf-8")):
            name = target.partition("#")[0]
            generated = (path.parent / name).resolve().relative_to(ROOT).as_posix()
            there = generated.removeprefix("docs/") in all_pages()
            assert there or (path.parent / name).exists(), (path, target)


@pytest.mark.parametrize("uri", sorted(own_pages()))
def test_every_page_is_in_the_navigation(uri: str) -> None:
    assert re.search(rf"[ ]{re.escape(uri)}$", NAVIGATION, re.MULTILINE)


def test_the_limits_on_their_page_are_those_of_the_code() -> None:
    text = (DOCS / "guides" / "limits.md").read_text(encoding="utf-8")
    rows = {what: limit for what, limit in re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \|", text)}
    limits, listening = Limits(), Listening()
    expected = {
        "Body": f"{bodies.MAX_BYTES >> 20} MB",
        "Depth of its lists and objects": bodies.MAX_DEPTH,
        "Its lists, objects and keys": bounded_json.MOST,
        "Length of an answer": f"{DEFAULT_LENGTH} tokens",
        "`n`, or prompts": MAX_ANSWERS,
        "Texts to embed or to rank": MAX_TEXTS,
        "`logprobs`, `top_logprobs`": MAX_LOGPROBS,
        "Images of a request": MAX_IMAGES,
        "File of an image": f"{MAX_IMAGE_MB} MB",
        "Pixels of an image": f"{MAX_MEGAPIXELS} million",
        "Decoding of an image": f"{images.CPU_SECONDS:g} s",
        "Requests at once": limits.max_requests,
        "Requests that wait": limits.max_queue,
        "Tokens in the prompts of one model": limits.max_queued_tokens,
        "Requests of batches": f"{limits.batch_requests}, and {limits.batch_beside} beside",
        "Unfinished batches of a key": routes.MAX_UNFINISHED,
        "Uploads of a key at once": routes.MAX_UPLOADS,
        "Connections": f"requests at once, those that wait, and {listening.spare_connections}",
        "Headers": f"64 KB, in {listening.header_seconds:g} s",
        "A body, with or without an answer": f"{listening.body_seconds:g} s",
        "Nothing asked": f"{listening.idle_seconds:g} s",
        "An answer that is not read": f"{listening.unread_seconds:g} s",
        "End of the server": f"{listening.grace:g} s",
    }
    wrong = [what for what, limit in expected.items() if not rows[what].startswith(str(limit))]
    assert wrong == []


@pytest.mark.parametrize("words", FINDS)
def test_what_readers_search_for_is_on_its_page(words: str) -> None:
    """`make docs` asks the search of the built site itself."""
    for page in FINDS[words]:
        text = (DOCS / page).with_suffix(".md").read_text(encoding="utf-8").lower()
        assert all(word in text for word in words.split()), page


def test_the_site_is_made_in_an_environment_of_its_own() -> None:
    """Whoever reads pages has asked for no command of an example in the environment of theirs."""
    words = ["make", "--dry-run", "--always-make", "docs"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    for needed in ("requirements-dev.txt", "requirements-docs.txt"):
        (line,) = (line for line in installs if needed in line)
        assert line.startswith("build/docs/bin/python ")


READMES = [path for path in ROOT.glob("plugins/*/README.md") if path.parent.name != "examples"]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.name))
def test_the_readme_of_a_package_is_short_and_leads_to_its_page(readme: Path) -> None:
    """It is what an index for packages shows."""
    text = readme.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 30
    assert f"# llmserve-{readme.parent.name}\n" in text
    assert re.search(r"(?m)^    pip install .*llmserve-\w+.*\n    llmserve ", text)
    own = [target for target in links(text) if target.startswith("../../docs/")]
    assert own
    for target in own:
        name, _, anchor = target.partition("#")
        page = (readme.parent / name).read_text(encoding="utf-8")
        assert not anchor or anchor in map(slug, re.findall(r"(?m)^#+ (.+)$", page)), target
