"""`llmserve.toml`: what it may say, and what it means for `build` and `serve`."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft7Validator

from llmserve.builder.server_file import GATEWAY, SERVE, ServerFile, parse_toml, schema
from llmserve.contract.warm_prompt import WarmPrompt
from llmserve.errors import ConfigError, ModelSourceError, UsageError
from llmserve_cli.group import cli
from llmserve_cli.serve import serve
from llmserve_cli.served_repository import options_of

FILE = """
[models.small]
source = "demo"
plugin = "hf"
options = { max_tokens = 8, decoupled = true }

[models.other]
source = "./folder"
batching = "static"

[serve]
http_port = 9
grace = 2.5

[gateway]
host = "0.0.0.0"
keys = "keys.txt"
frontends = ["openai"]
no_auth = false
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))


def written(text: str, path: str = "llmserve.toml") -> Path:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def test_a_file_says_what_to_build_and_how_to_serve_it(tmp_path: Path) -> None:
    file = ServerFile.read(written(FILE, "sub/llmserve.toml"))
    folder = tmp_path / "work" / "sub"
    assert file.repository == Path("sub/model_repository")
    small, other = file.models.values()
    assert (small.name, small.model, small.plugin) == ("small", "demo", "hf")
    assert small.options == {"max_tokens": 8, "decoupled": True}
    assert (other.model, other.plugin, other.batching) == (str(folder / "folder"), "", "static")
    assert file.serve == {"http_port": 9, "grace": 2.5}
    assert file.gateway["keys"] == str(folder / "keys.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serv]", "no key is called serv: did you mean 'serve'?"),
        ("[serve]\nhttp-port = 1", "no key is called serve.http-port: did you mean 'http_port'"),
        ("[models.m]\nsorce = 'x'", "no key is called models.m.sorce: did you mean 'source'?"),
        ("[models.m]\nplugin = 'x'", 'models.m has no source: add source = "…"'),
        ("[models]\nm = 1", "models.m is not a table: begin it with [models.m]"),
        ("[models.'a b']\nsource = 'x'", "'a b' cannot be a model's name"),
        ("models = 1", "models takes a table, not 1"),
        ("[serve]\nhttp_port = '1'", "serve.http_port takes a whole number, not '1'"),
        ("[serve]\nhttp_port = true", "serve.http_port takes a whole number, not True"),
        ("[serve]\ngrace = 'x'", "serve.grace takes a number, not 'x'"),
        ("[serve]\nmemory = nan", "serve.memory takes a number, 0 or more, not nan"),
        ("[serve]\nmemory = inf", "serve.memory takes a number, 0 or more, not inf"),
        ("[serve]\nreplicas = -1", "serve.replicas takes a whole number, 0 or more, not -1"),
        (f"x = {'[' * 3000}", "llmserve.toml is "),
        ("[gateway]\nno_auth = 1", "gateway.no_auth takes true or false, not 1"),
        ("[gateway]\nfrontends = [1]", "gateway.frontends takes a list of texts, not [1]"),
        ("[models.m]\nsource = 'x'\nwarm = 'a.txt'", "models.m.warm takes a list of paths, not"),
        ("[models.m]\nsource = 'x'\nwarm = [1]", "models.m.warm takes a list of paths, not [1]"),
        ("x = ", "llmserve.toml is not TOML: "),
    ],
)
def test_a_mistake_names_the_key_and_the_fix(text: str, message: str) -> None:
    path = written(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        ServerFile.read(path)
    assert "\n" not in str(raised.value)
    if re.search(r"takes|no key|has no", message) and not re.search(r"= (nan|inf)$", text):
        assert not Draft7Validator(schema()).is_valid(parse_toml(text))


def test_system_prompts_are_read_from_the_folder_of_the_file(tmp_path: Path) -> None:
    path = written(
        "[models.m]\nsource = 'demo'\nwarm = ['a.txt', 'more/b.txt']\n"
        "[models.n]\nsource = 'demo'\nwarm = []\n",
        "sub/llmserve.toml",
    )
    written("You help.\nAlways.\n", "sub/a.txt")
    Path("sub/more").mkdir()
    Path("sub/more/b.txt").write_bytes("Du hilfst: für alle.\r\n".encode())
    prompts = ServerFile.read(path, named=False).warm_prompts()
    assert prompts == {
        "m": (
            WarmPrompt("a.txt", "You help.\nAlways."),
            WarmPrompt("b.txt", "Du hilfst: für alle."),
        )
    }
    Draft7Validator(schema()).validate(parse_toml(path.read_text()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "there is no file "),
        (".", None, "there is no file "),
        ("/dev/zero", None, "there is no file /dev/zero"),
        ("big.txt", b"x" * ((1 << 20) + 1), "is over 1 MB: no model reads that much at once"),
        ("bad.txt", b"\xff\xfe", "cannot be read: it is no UTF-8"),
        ("empty.txt", b" \n", "is empty"),
    ],
)
def test_a_system_prompt_that_cannot_be_read_is_named_in_a_line(
    name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    path = written(f"[models.m]\nsource = 'demo'\nwarm = ['{name}']")
    file = ServerFile.read(path)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        file.warm_prompts()
    assert str(raised.value).startswith("llmserve.toml: models.m.warm: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_was_only_found_names_no_prompt_elsewhere() -> None:
    path = written("[models.m]\nsource = 'demo'\nwarm = ['a.txt', '../secret.txt']")
    with pytest.raises(ConfigError, match=r"models\.m\.warm is outside of the folder"):
        ServerFile.read(path, named=False)
    assert len(ServerFile.read(path).warm["m"]) == 2
    many = written(f"[models.m]\nsource = 'demo'\nwarm = {['a.txt'] * 9}")
    with pytest.raises(ConfigError, match="names more than 8 files"):
        ServerFile.read(many)


def test_a_file_that_is_not_there_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        ServerFile.read(Path("none.toml"))


def test_the_schema_accepts_what_is_accepted() -> None:
    content: dict[str, Any] = {
        "repository": "r",
        "models": {"m": {"source": "demo", "options": {"dtype": "float32"}}},
        "serve": {"replicas": 2},
        "gateway": {"frontends": ["none"]},
    }
    Draft7Validator.check_schema(schema())
    Draft7Validator(schema()).validate(content)
    assert json.loads(json.dumps(schema())) == schema()


def test_each_key_sets_an_option_of_serve() -> None:
    examples: dict[str, Any] = {
        "text": "x", "path": "x", "whole": 3, "number": 2.5, "flag": True, "texts": ["x"]
    }  # fmt: skip
    tables = {
        name: {key: examples[row.kind] for key, row in keys.items()}
        for name, keys in (("serve", SERVE), ("gateway", GATEWAY))
    }
    options = options_of(ServerFile(Path("f"), Path("r"), **tables, pinned=("m",)))
    assert len(options) == len(SERVE) + len(GATEWAY) + 1
    assert options.keys() <= {param.name for param in serve.params}
    assert options["frontend_names"] == ["x"]
    assert (options["host"], options["frontend_port"], options["pinned"]) == ("x", 3, ("m",))


def test_build_builds_what_is_missing_or_changed(tmp_path: Path) -> None:
    two = '[models.a]\nsource = "demo"\nplugin = "hf"\n\n[models.b]\nsource = "demo"\n'
    path = written(f'{two}plugin = "hf"\n')
    first = invoke("build", "--config", str(path))
    assert first.stdout.split() == ["model_repository/a", "model_repository/b"]
    assert first.stderr == (
        "llmserve: a is built\nllmserve: b is built\nnext: llmserve serve --config llmserve.toml\n"
    )
    assert "is built" not in invoke("build", "--config", str(path)).stderr
    written(f'{two}plugin = "hf"\noptions = {{ max_tokens = 7 }}\n')
    changed = invoke("build", "--config", str(path)).stderr
    assert changed.startswith("llmserve: b is built\nnext:")
    assert "a is built" in invoke("build", "--config", str(path), "--force").stderr
    assert invoke("remove", "a", "--yes").exception is None
    names = [path.name for path in Path("model_repository").iterdir()]
    assert sorted(names) == ["Dockerfile", "b"], "nothing of this machine is in there"
    assert len([*(tmp_path / "home" / "records").iterdir()]) == 1


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["--name", "x"], "--name"),
        (["--plugin", "hf", "--json"], "--plugin, --json"),
        (["--decoupled", "true"], "--decoupled, true"),
    ],
)
def test_a_build_of_a_file_takes_nothing_else(words: list[str], others: str) -> None:
    error = invoke("build", "--config", str(written(FILE)), *words).exception
    assert isinstance(error, UsageError)
    assert f"--config says what to build, and {others} is given too" in str(error)


def test_a_build_of_a_file_without_models_is_refused() -> None:
    error = invoke("build", "--config", str(written("[serve]\nreplicas = 2\n"))).exception
    assert str(error) == "llmserve.toml has no model: add [models.NAME] with its source"


def test_an_error_of_a_build_says_which_model_has_it() -> None:
    written('[models.a]\nsource = "./none"\nplugin = "hf"\n')
    error = invoke("build", "--config", "llmserve.toml").exception
    assert str(error).startswith("llmserve.toml: models.a: no folder at ")
    assert isinstance(error, ModelSourceError)


@pytest.mark.parametrize("command", ["serve", "deploy kubernetes"])
def test_help_reads_no_file(command: str) -> None:
    written("[models")
    done = invoke(*command.split(), "--help")
    assert (done.exception, done.stderr) == (None, "")


ONE = '[models.a]\nsource = "demo"\nplugin = "hf"\n\n[serve]\nhttp_port = 9\n'


def test_serve_reads_the_file_and_options_of_the_command_line_come_first() -> None:
    same = "two of the ports are the same"
    # Its own port may be taken on this machine.
    any_port = "\n[gateway]\nport = 0\n"
    path = written(f"{ONE}grpc_port = 9\n{any_port}", "sub/my.toml")
    first = invoke("serve", "--config", str(path))
    assert str(first.exception).startswith(same)
    assert first.stderr == "llmserve: a is built\n"
    assert Path("sub/model_repository/a/config.pbtxt").is_file()
    written(f"{ONE}{any_port}", "sub/my.toml")
    assert str(invoke("serve", "--config", str(path), "--grpc-port", "9").exception).startswith(
        same
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        written(f"{ONE}\n[gateway]\nport = {port}\n", "sub/my.toml")
        free = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
        error = invoke("serve", "--config", str(path), *free).exception
    assert str(error).startswith(f"port {port} for frontend is in use")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("repository = '..'", "repository is outside of the folder"),
        ("repository = '/etc'", "repository is outside of the folder"),
        ("repository = 'link/r'", "repository is outside of the folder"),
        ("[serve]\nlog_file = '~/x'", "serve.log_file is outside of the folder"),
        ("[serve]\nopen_triton = true", "serve.open_triton opens the server"),
        ("[gateway]\nkeys = '../keys.txt'", "gateway.keys is outside of the folder"),
        ("[gateway]\nno_auth = true", "gateway.no_auth opens the server"),
        ('[serve]\non_fault = "rm -rf ."', "serve.on_fault may run a command"),
    ],
)
def test_a_file_that_nobody_named_opens_nothing_and_stays_in_its_folder(
    text: str, what: str, tmp_path: Path
) -> None:
    Path("link").symlink_to(tmp_path)
    path = written(text)
    error = str(invoke("serve").exception)
    assert f"llmserve.toml: {what}, and this file was only found here" in error
    assert error.endswith("if you trust it, name it: --config llmserve.toml")
    assert ServerFile.read(path).path == path
    kept = "repository = 'sub/r'\n[gateway]\nkeys = 'keys.txt'\nno_auth = false"
    assert ServerFile.read(written(kept), named=False).repository == Path("sub/r")


def test_serve_reads_the_file_of_the_folder_unless_told_what_to_serve() -> None:
    written(f"{ONE}grpc_port = 9\n")
    found = invoke("serve")
    assert str(found.exception).startswith("two of the ports are the same")
    assert found.stderr.startswith("llmserve: reading llmserve.toml\n")
    assert "no repository at" in str(invoke("serve", "./none").exception)
    error = invoke("serve", "demo", "--config", "llmserve.toml").exception
    assert str(error) == "--config llmserve.toml says what to serve: leave out demo, or --config"
    assert "there is no file x.toml" in str(invoke("serve", "--config", "x.toml").exception)
    error = invoke("serve", "--plugin", "hf").exception
    assert str(error).endswith("for a model that is built: write them into llmserve.toml")


def test_a_model_that_others_wrote_says_where_its_text_is(tmp_path: Path) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text('[models.own]\ninput = "PROMPT"\noutput = "ANSWER"\n', encoding="utf-8")
    read = ServerFile.read(file)
    assert read.models == {}
    assert read.texts == {"own": ("PROMPT", "ANSWER")}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('input = "A"', "has no output"),
        ('output = "A"', "has no input"),
        ("", "has no source"),
        ('source = "demo"\ninput = "A"\noutput = "B"', "a model with a source is built"),
        ('plugin = "hf"\ninput = "A"\noutput = "B"', "a model without a source is not built"),
        ('input = \'A" } } x\'\noutput = "B"', "name a tensor of the model"),
    ],
)
def test_a_model_is_built_or_others_wrote_it(tmp_path: Path, lines: str, why: str) -> None:
    file = tmp_path / "llmserve.toml"
    file.write_text(f"[models.own]\n{lines}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        ServerFile.read(file)
