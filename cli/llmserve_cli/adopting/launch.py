"""How a server was started, as a process or in a container, and what that becomes here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import UsageError
from llmserve.plugin import BuildSpec
from llmserve_cli.adopting.adopted import (
    Adopted,
    AdoptedModel,
    Origin,
    Remark,
    Secret,
    Value,
    holds_secret,
    names_secret,
    shown,
)
from llmserve_cli.adopting.engines import ANYWHERE, Engine, engine_of_image, program_in
from llmserve_cli.adopting.rows import Row
from llmserve_cli.adopting.source_text import SourceText, exists
from llmserve_cli.adopting.words import Word, commands_in, is_known

KEYS = "llmserve-keys.json"
_SHELLS = frozenset({"sh", "bash", "ash", "dash"})
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_TRITONS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_OF_MACHINE = re.compile(
    r"(CUDA|NVIDIA|NCCL|HF|HUGGING_?FACE|TRANSFORMERS|OMP|MKL|ROCR|HIP|VLLM|GLOO|PYTORCH|RAY"
    r"|TORCH|TZ|LANG|LC|HTTPS?_PROXY|NO_PROXY|XDG|HOME|PATH|LD|OLLAMA|GGML|LLAMA)(_|$)",
    re.IGNORECASE,
)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_API_TOKEN")


@dataclass(frozen=True)
class Port:
    """A port of a container that this machine offers."""

    address: str
    here: str
    inside: str
    line: int

    @classmethod
    def parse(cls, text: str, line: int) -> Port:
        """Read one as Docker does.

        >>> Port.parse("127.0.0.1:80:8000/tcp", 1)
        Port(address='127.0.0.1', here='80', inside='8000', line=1)
        """
        parts = text.partition("/")[0].rsplit(":", 2)
        inside = parts.pop()
        here = parts.pop() if parts else ""
        return cls(parts.pop().strip("[]") if parts else "", here, inside, line)


@dataclass
class Launch:
    """One start of a server."""

    source: SourceText
    words: Sequence[Word] = ()
    """Its program, if it is named, and its arguments."""
    image: Word | None = None
    has_program: bool = False
    """Whether the words begin with a program, in place of the image's."""
    variables: dict[str, Word] = field(default_factory=dict)
    ports: Sequence[Port] = ()
    mounts: Sequence[tuple[str, str]] = ()
    """Folders of this machine, and where the container has them."""
    in_container: bool = False
    uses_host_network: bool = False
    is_open: bool = True
    """Whether others reach what listens on all addresses."""
    replicas: Value | None = None
    model: Value | None = None
    """The model, if it is not in the arguments."""
    name: Value | None = None
    unread: list[Word] = field(default_factory=list)
    """Files that it names, and that are not here."""


@dataclass(frozen=True)
class Setting:
    """An option that was set, or a word that belongs to none."""

    name: str
    values: tuple[str, ...]
    line: int
    row: Row | None

    @property
    def value(self) -> str:
        return self.values[0] if self.values else (self.row.fixed if self.row else "")


def engine_of(launch: Launch) -> tuple[Engine, list[Word]] | None:
    """Return the server that this starts, and its arguments; None if it is no known one."""
    words = _without_shell(launch)
    if found := program_in(words):
        engine, at = found
        return engine, list(words[at:])
    if launch.image is None:
        return None
    of_image = engine_of_image(launch.image.text)
    return None if of_image is None or launch.has_program else (of_image, list(words))


def _without_shell(launch: Launch) -> Sequence[Word]:
    """Return the command that a shell is given as one word."""
    words = launch.words
    for at, word in enumerate(words[:4]):
        if word.text.rsplit("/", 1)[-1] not in _SHELLS or at + 2 >= len(words):
            continue
        if words[at + 1].text.startswith("-") and "c" in words[at + 1].text:
            script = words[at + 2]
            text = SourceText(launch.source.name, script.text, launch.source.folder)
            lines = [
                [Word(each.text, each.line + script.line - 1) for each in command]
                for command in commands_in(text)
            ]
            return next((line for line in lines if program_in(line)), lines[-1] if lines else words)
    return words


def settings_in(engine: Engine, words: Sequence[Word]) -> Iterator[Setting]:
    """Yield the options of a command, and the words that belong to none."""
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.text.startswith("-") or _NUMBER.fullmatch(word.text) or word.text == "-":
            yield Setting("", (word.text,), word.line, None)
            continue
        flag, equals, value = word.text.partition("=")
        row = engine.row(flag)
        if row and flag.startswith("-O") and flag not in row.names:
            flag, equals, value = "-O", "=", flag[2:].strip(".") or value
        values = [value] if equals else []
        takes = row is None or row.takes
        most = 64 if row and row.many else 1
        while takes and remaining and len(values) < most and not (equals and most == 1):
            following = remaining[0].text
            if following.startswith("-") and not _NUMBER.fullmatch(following):
                break
            values.append(remaining.pop(0).text)
        yield Setting(flag, tuple(values), word.line, row)


def adopt_launch(launch: Launch, adopted: Adopted) -> bool:
    """Add what a start of a server says; return whether it is the start of a known one."""
    if (found := engine_of(launch)) is None:
        return False
    engine, words = found
    for word in launch.unread:
        origin = Origin(launch.source.name, word.line, shown(word.text))
        adopted.miss(origin, "it cannot be read here: set its values by hand")
    _Adoption(launch, engine, adopted).take(words)
    return True


class _Adoption:
    """The start of one server, while it is read."""

    def __init__(self, launch: Launch, engine: Engine, adopted: Adopted) -> None:
        self._launch, self._engine, self._adopted = launch, engine, adopted
        self._source: Value | None = launch.model
        self._file: Value | None = None
        self._name: Value | None = launch.name
        self._other_names: tuple[str, ...] = ()
        self._plugin: Value | None = None
        self._options: dict[str, Value] = {}
        self._engine_args: dict[str, Value] = {}
        self._server: dict[str, Value] = {}
        self._has_key = False

    def take(self, words: Sequence[Word]) -> None:
        is_first = self._engine.positional
        for setting in (*self._variables(), *settings_in(self._engine, words)):
            if setting.name:
                self._set(setting)
            elif is_first and self._source is None:
                self._source = Value(setting.value, self._origin(setting, "MODEL"))
            else:
                self._adopted.miss(self._origin(setting), "it was not understood")
        self._add_server()
        self._add_model()

    def _origin(self, setting: Setting, name: str = "") -> Origin:
        text = shown(name or setting.name or "the word", " ".join(setting.values) or None)
        return Origin(self._launch.source.name, setting.line, text)

    def _variables(self) -> Iterator[Setting]:
        """Yield the options that variables of the environment set; others are told."""
        for variable, word in self._launch.variables.items():
            flag = self._engine.flag_of(variable)
            row = self._engine.row(flag) if flag else None
            # What a variable of another program has may be a secret, whatever it is called.
            known = word.text if row is not None else None
            origin = Origin(self._launch.source.name, word.line, shown(variable, known))
            if row is not None and (row.takes or word.text.lower() in ("1", "true", "on")):
                yield Setting(flag, (word.text,) if row.takes else (), word.line, row)
            elif variable in HUB_TOKENS:
                self._adopted.secrets.append(Secret("HF_TOKEN", replace_text(origin, variable)))
            elif names_secret(variable) or holds_secret(word.text):
                self._adopted.secrets.append(Secret(variable, replace_text(origin, variable)))
            elif row is None and not flag and _OF_MACHINE.match(variable):
                what = "a variable of the environment: set it for llmserve serve, if it reads it"
                self._adopted.unneeded.append(Remark(origin, what))
            elif row is None:
                self._adopted.miss(origin, "no option of the server is called so")

    def _set(self, setting: Setting) -> None:
        row, origin = setting.row, self._origin(setting)
        adopted = self._adopted
        if row is None:
            if names_secret(setting.name) or any(map(holds_secret, setting.values)):
                adopted.secrets.append(Secret(_variable_of(setting.name), origin))
            else:
                adopted.miss(origin, f"no option of {self._engine.name} that is known here")
            return
        value = row.read(setting.value)
        if row.takes and not setting.values:
            adopted.miss(origin, "its value is missing")
            return
        if row.goal not in ("key", "secret") and any(map(holds_secret, setting.values)):
            adopted.miss(origin, "it has a secret in it, which is not written: set it by hand")
            return
        if "." in setting.name and row.goal in ("option", "serve", "gateway", "adapters"):
            adopted.miss(origin, "it is a part of a value: give the whole one as JSON")
            return
        is_used = row.goal not in ("unneeded", "unmatched", "key", "secret", "source", "name")
        if is_used and not is_known(value):
            adopted.miss(origin, "a shell computes it, and none was run: set it by hand")
            return
        self._apply(row, setting, value, origin)

    def _apply(self, row: Row, setting: Setting, value: str, origin: Origin) -> None:
        adopted = self._adopted
        match row.goal:
            case "source":
                self._source = Value(value, origin)
            case "file":
                self._file = Value(value, origin)
            case "name":
                self._name = Value(value, origin)
                self._other_names = tuple(setting.values[1:])
            case "option":
                if value in row.neutral:
                    adopted.unneeded.append(Remark(origin, "it asks for nothing"))
                else:
                    self._options[row.key] = Value(value, origin)
            case "engine_arg":
                self._take_engine_arg(row, setting, value, origin)
            case "plugin":
                if value:
                    self._plugin = Value(value, origin)
            case "serve" | "gateway":
                self._server[row.key] = Value(value, origin)
            case "key":
                self._take_key(setting, origin)
            case "secret":
                variable = _variable_of(setting.name)
                adopted.secrets.append(Secret(variable, replace_text(origin, setting.name)))
            case "adapters":
                self._take_adapters(row, setting, origin)
            case "unneeded":
                is_none = row.neutral and value not in row.neutral
                (adopted.unmatched if is_none else adopted.unneeded).append(
                    Remark(origin, row.says)
                )
            case "unmatched":
                adopted.miss(origin, row.says)

    def _take_engine_arg(self, row: Row, setting: Setting, value: str, origin: Origin) -> None:
        found = [_typed(each) for each in setting.values] if row.many else _typed(value)
        _, *path = setting.name.split(".")
        if path:
            # A part of an object, whose other parts may stand in options before it.
            known = self._engine_args.get(row.key)
            whole = known.value if known and isinstance(known.value, dict) else {}
            found = _with_part(whole, [each.replace("-", "_") for each in path], found)
        self._engine_args[row.key] = Value(found, origin)

    def _take_key(self, setting: Setting, origin: Origin) -> None:
        # A reference to a variable tells its name.
        named = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", setting.value)
        variable = named[1] if named else self._engine.key_variable or "OPENAI_API_KEY"
        self._adopted.secrets.append(Secret(variable, replace_text(origin, setting.name), True))
        self._adopted.gateway["keys"] = Value(KEYS, replace_text(origin, f"{setting.name} …"))
        self._has_key = True

    def _take_adapters(self, row: Row, setting: Setting, origin: Origin) -> None:
        pairs = []
        for text in setting.values:
            for each in [text] if text.startswith("{") else text.split(","):
                name, path = _adapter(each)
                if not path or path.lower().endswith(".gguf"):
                    self._adopted.miss(origin, row.says or "llmserve adapter add MODEL NAME=FOLDER")
                    continue
                pairs.append(f"{name}={self._located(path, origin)}")
        if pairs:
            self._options["adapters"] = Value(",".join(pairs), origin)

    def _add_model(self) -> None:
        adopted, launch = self._adopted, self._launch
        if self._engine.name == "Triton":
            if self._source:
                where = self._located(str(self._source.value), self._source.origin)
                adopted.repository = Value(where, self._source.origin)
            return
        if self._source is None:
            place = Origin(launch.source.name, launch.words[0].line if launch.words else 0, "")
            adopted.miss(place, f"{self._engine.name} is not told a model here: name one with "
                         "--model")  # fmt: skip
            self._source = Value("", place)
        source, origin = str(self._source.value), self._source.origin
        if self._file:
            source = f"{source.partition(':')[0]}:{self._file.value}"
        elif self._engine.name == "llama.cpp" and re.fullmatch(r"[\w.-]+/[\w.-]+:[\w.-]+", source):
            source, _, form = source.partition(":")
            adopted.miss(origin, f"name the GGUF file of {form}, as {source}:FILE.gguf")
        if not is_known(source):
            adopted.miss(origin, "a shell computes it, and none was run: name it with --model")
        model = AdoptedModel(
            "", Value(self._located(source, origin), origin), self._plugin,
            options=self._options, engine_args=self._engine_args,
        )  # fmt: skip
        self._name_model(model)
        if "draft_model" in model.options:
            draft = model.options["draft_model"]
            where = self._located(str(draft.value), draft.origin)
            model.options["draft_model"] = Value(where, draft.origin)
        adopted.models.append(model)

    def _name_model(self, model: AdoptedModel) -> None:
        asked = str(self._name.value) if self._name else ""
        model.name = model_name(asked or str(model.source.value))
        answers_to = asked
        if not asked and self._engine.name in ("vLLM", "trtllm-serve") and self._source:
            answers_to = str(self._source.value)
        if holds_secret(answers_to):
            model.name = "model"
            return
        model.called = answers_to
        model.also_called = tuple(each for each in self._other_names if not holds_secret(each))

    def _add_server(self) -> None:
        adopted, launch, server = self._adopted, self._launch, self._server
        if launch.replicas is not None:
            server.setdefault("replicas", launch.replicas)
        for key in ("replicas", "grace", "http_port", "grpc_port", "metrics_port"):
            if (given := server.pop(key, None)) is None:
                continue
            if str(given.value).isdecimal():
                number = int(given.value)
                if key != "replicas" or number > 1:
                    add(adopted, adopted.serve, key, Value(number, given.origin))
            else:
                adopted.miss(given.origin, "it is no whole number")
        for key in ("otlp_endpoint", "log_file"):
            if key in server:
                add(adopted, adopted.serve, key, server.pop(key))
        self._add_port(server.pop("port", None))
        self._add_host(server.pop("host", None))

    def _add_port(self, given: Value | None) -> None:
        engine, launch, adopted = self._engine, self._launch, self._adopted
        own = (
            engine.container_port if launch.in_container and engine.container_port else engine.port
        )
        file = launch.source.name
        port = given or (Value(str(own), Origin(file, 0, f"{engine.name}'s port")) if own else None)
        self._published: Port | None = None
        if port is None:
            return
        matching = [each for each in launch.ports if each.inside == str(port.value)]
        offered = matching or (list(launch.ports) if len(launch.ports) == 1 else [])
        if offered and offered[0].here:
            published = self._published = offered[0]
            text = f"port {published.here}:{published.inside}"
            port = Value(published.here, Origin(file, published.line, text))
        elif given is None and engine.newest_port:
            instead = f"{port.value} is written, and its newest sources say {engine.newest_port}"
            adopted.miss(port.origin, f"{instead}: see which one it listens on")
        text = str(port.value)
        if not text.isdecimal() or not 0 < int(text) < 1 << 16:
            adopted.miss(port.origin, "it is no port")
            return
        add(adopted, adopted.gateway, "port", Value(int(text), port.origin))

    def _add_host(self, given: Value | None) -> None:
        """Open the server as the old one was, if that asked for a key."""
        launch, adopted = self._launch, self._adopted
        file = launch.source.name
        host = given or Value(
            self._engine.host, Origin(file, 0, f"{self._engine.name} listens on all addresses")
        )
        if launch.ports and not launch.uses_host_network:
            published = self._published or launch.ports[0]
            address = published.address or ANYWHERE
            at = published.address or "all addresses"
            text = f"port {published.here or published.inside} of {at}"
            host = Value(address, Origin(file, published.line, text))
        elif not launch.is_open:
            return
        if self._engine.name == "Triton" or str(host.value) in _LOOPBACK:
            return
        if self._has_key or "keys" in adopted.gateway:
            add(adopted, adopted.serve, "host", host)
            return
        adopted.miss(
            host.origin, 'it was open without a key; here it stays on this machine, unless '
            '[serve] has host = "0.0.0.0" and [gateway] has keys: llmserve key new NAME',
        )  # fmt: skip

    def _located(self, text: str, origin: Origin) -> str:
        """Return where a model of the old server is on this machine, or its id on the hub."""
        return locate(
            text, self._launch.source.folder,
            mounts=self._launch.mounts, in_container=self._launch.in_container,
            miss=lambda words: self._adopted.miss(origin, words),
        )  # fmt: skip


def locate(
    text: str,
    folder: Path,
    *,
    mounts: Sequence[tuple[str, str]] = (),
    in_container: bool = False,
    miss: Callable[[str], None],
) -> str:
    """Return where a model is on this machine, or its id; nothing is opened."""
    if match := re.fullmatch(r"(?:hf://|https?://huggingface\.co/|hf\.co/)([\w.-]+/[\w.-]+)", text):
        return match[1]
    if match := re.match(r"([a-z0-9]+)://", text):
        miss(f"{match[1]}:// is not read: copy the model here, and name it with --model")
        return text
    for here, there in sorted(mounts, key=lambda each: -len(each[1])):
        inside = there.rstrip("/")
        if inside and (text == inside or text.startswith(f"{inside}/")):
            rest = text[len(inside) :].lstrip("/")
            if not here.startswith(("/", ".", "~", "$")):
                miss(f"it is in the volume {here}: copy it out, and name it with --model")
                return text
            for variable in ("${PWD}", "$PWD", "$(pwd)"):
                here = here.replace(variable, ".")
            here = re.sub(r"\$\{?HOME\}?", "~", here)
            text, in_container = str(Path(here) / rest), False
            if not text.startswith(("/", "~")):
                text = f"./{text}"
            break
    if text.startswith(("./", "../")) or text in (".", ".."):
        if in_container:
            miss("a path inside of the container: name the model with --model")
        return _absolute(folder, text)
    if text.startswith("/") and in_container:
        miss("a path inside of the container: name the model with --model")
    elif not text.startswith(("/", "~")) and not in_container and exists(folder, text):
        return _absolute(folder, text)
    return text


def _absolute(folder: Path, text: str) -> str:
    return os.path.normpath(folder / text)


def model_name(text: str) -> str:
    """Return a name that a model may have here."""
    last = text.rstrip("/").rsplit("/", 1)[-1].lstrip("_-. ")
    try:
        return BuildSpec("", last[-120:] if last.endswith(".gguf") else last[:120]).model_name
    except UsageError:
        return "model"


def replace_text(origin: Origin, text: str) -> Origin:
    return Origin(origin.file, origin.line, text)


def add(adopted: Adopted, table: dict[str, Value], key: str, value: Value) -> None:
    """Set a value of the server, which several models share: the first one stays."""
    if key in table and table[key].value != value.value:
        adopted.miss(value.origin, f"all models have one {key}: it is {table[key].value}")
    else:
        table.setdefault(key, value)


def free_ports(adopted: Adopted) -> None:
    """Have Triton's own ports give way to a port that the old server had."""
    port = adopted.gateway.get("port")
    for key, own in _TRITONS.items():
        if port is not None and port.value == own and key not in adopted.serve:
            text = f"Triton's own port would be {own}, too"
            adopted.serve[key] = Value(0, replace_text(port.origin, text))


def _with_part(whole: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return an object with one more part, however deep that is.

    >>> _with_part({"a": {"b": 1}}, ["a", "c"], 2)
    {'a': {'b': 1, 'c': 2}}
    """
    name, *rest = path
    below = whole.get(name)
    inner = _with_part(below if isinstance(below, dict) else {}, rest, value) if rest else value
    return {**whole, name: inner}


def _variable_of(flag: str) -> str:
    """Return the variable that a secret is in, if a build reads it or somebody sets it.

    >>> _variable_of("--hf-token"), _variable_of("--some-secret")
    ('HF_TOKEN', 'SOME_SECRET')
    """
    return flag.lstrip("-").upper().replace("-", "_")


def _typed(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if value is None else value


def _adapter(text: str) -> tuple[str, str]:
    """Return the name and the place of an adapter, as vLLM and TGI write them."""
    if text.startswith("{"):
        content = _typed(text)
        content = content if isinstance(content, dict) else {}
        return model_name(str(content.get("name", ""))), str(content.get("path", ""))
    name, equals, path = text.partition("=")
    return (model_name(name), path) if equals else (model_name(text), text)
