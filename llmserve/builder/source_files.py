"""Selects the tokenizer and weight files of a model, and checks that they are consistent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmserve.builder.reading import read_json, read_object
from llmserve.builder.source import PICKLED, WEIGHTS, ModelSource
from llmserve.builder.weights.stored import INDEX, read_stored, shards_of
from llmserve.errors import ModelSourceError

_TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TOKENIZER = _TEMPLATES | {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
}
_TOKENIZER_SUFFIXES = (".model", ".tiktoken")
_VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt"}
_OF_BYTES = ("byt5", "canine", "perceiver")
"""Tokenizers of bytes or characters, which have no file of their tokens."""


def tokenizer_files(source: ModelSource) -> list[Path]:
    """Return the tokenizer's files, with ``config.json``, which determines its type."""
    files = [
        path
        for path in _all(source)
        if path.name in _TOKENIZER or path.suffix in _TOKENIZER_SUFFIXES or path.suffix == ".py"
    ]
    if not any(map(_has_tokens, files)) and not _needs_no_tokens(source):
        raise ModelSourceError(
            f"{source.asked} has no tokenizer",
            hint="put tokenizer.json into it, or choose another tokenizer with --tokenizer",
        )
    config = source.path / "config.json"
    return [config, *files] if config.is_file() else files


def _has_tokens(path: Path) -> bool:
    return path.name in _VOCABULARIES or path.suffix in _TOKENIZER_SUFFIXES


def _needs_no_tokens(source: ModelSource) -> bool:
    """Return whether a tokenizer is known by its settings alone, or is code of its own."""
    settings, model = (
        read_object(path) if (path := source.path / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json")
    )
    kind = str(settings.get("tokenizer_class") or model.get("model_type")).lower()
    return "auto_map" in settings or any(name in kind for name in _OF_BYTES)


def has_chat_template(source: ModelSource) -> bool:
    """Return whether the tokenizer has a chat template."""
    if any((source.path / name).is_file() for name in _TEMPLATES):
        return True
    config = source.path / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_object(config)


def check_chat_template(source: ModelSource) -> None:
    """Refuse a chat template that cannot be read: the first message would fail."""
    try:
        from jinja2 import Environment, TemplateSyntaxError, ext
    except ImportError:
        # Nothing renders it then, either.
        return

    class Generation(ext.Extension):
        """The tag of transformers around what the model has said."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[ext.loopcontrols, Generation])  # noqa: S701
    for name, template in _chat_templates(source):
        try:
            environment.parse(template)
        except (TemplateSyntaxError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ModelSourceError(
                f"the chat template of {source.asked} cannot be read ({name}{line}): {error}",
                hint="mend it, or take the one that belongs to the model",
            ) from None


def _chat_templates(source: ModelSource) -> Iterator[tuple[str, str]]:
    """Yield each chat template with the name of its file."""
    file = source.path / "chat_template.jinja"
    if file.is_file():
        yield file.name, file.read_text(encoding="utf-8", errors="replace")
    for file in (source.path / "chat_template.json", source.path / "tokenizer_config.json"):
        found = read_object(file).get("chat_template") if file.is_file() else None
        # A model may have several, each with its name.
        for each in found if isinstance(found, list) else [found]:
            template = each.get("template") if isinstance(each, dict) else each
            if isinstance(template, str):
                yield file.name, template


def processor_files(source: ModelSource) -> list[Path]:
    """Return the files that say how images are made into numbers, of a model that reads images."""
    names = ("preprocessor_config.json", "processor_config.json")
    return [path for path in _all(source) if path.name in names]


def weight_files(source: ModelSource, *, pickle: bool) -> list[Path]:
    """Return the weights and the files needed to load them."""
    patterns = [WEIGHTS, "*.safetensors.index.json", "config.json", "generation_config.json"]
    if pickle:
        patterns += [PICKLED, "*.bin.index.json"]
    return [
        path
        for path in _all(source)
        if path.suffix == ".py" or any(path.match(pattern) for pattern in patterns)
    ]


def _all(source: ModelSource) -> list[Path]:
    if not source.path.is_dir():
        return []
    paths = sorted(source.path.iterdir())
    for path in paths:
        if not path.exists() and path.is_symlink():
            raise ModelSourceError(f"{path} is a link to nothing", hint="put the file itself there")
        if not (path.is_file() or path.is_dir()):
            # Whoever opened it would wait for what another program writes into it.
            raise ModelSourceError(f"{path} is no file", hint="put a file there")
    return [path for path in paths if path.is_file()]


def check_links(files: Iterable[Path], folder: Path) -> None:
    """Refuse links that lead out of a model's folder, except the hub's links into its cache.

    Their targets would be copied into the repository, whatever they are.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(parent) for parent in allowed):
            raise ModelSourceError(
                f"{file} is a link to {target}, outside the model's folder",
                hint="put the file itself there",
            )


_OBJECTS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def check_intact(files: Iterable[Path]) -> None:
    """Refuse files whose content does not match their names; weights are not read in full."""
    for file in files:
        if file.name in _OBJECTS:
            read_object(file)
        elif file.name.endswith(INDEX):
            shards_of(file)
        elif file.suffix == ".json":
            read_json(file)
        elif file.suffix == ".safetensors":
            read_stored(file)


def config_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that can name code."""
    return sorted(folder.glob("*config.json"))


def check_code(files: Iterable[Path], *, trusted: bool) -> None:
    """Refuse a model whose code would be downloaded from elsewhere, in its latest version.

    Code that only ``trust_remote_code`` runs is looked for if that is given: many models name it
    and do not need it.
    """
    for file in files:
        if not file.name.endswith("config.json"):
            continue
        # Some models have lists of other things in files of such a name.
        config = read_object(file) if file.name in _OBJECTS else read_json(file)
        if kernels := kernels_elsewhere(config):
            raise ModelSourceError(
                f"{file.name} takes its Python code from {kernels}, without a pinned version",
                hint="remove that entry from the file",
            )
        if trusted and isinstance(config, dict) and (elsewhere := _code_elsewhere(config)):
            raise ModelSourceError(
                f"{file.name} takes its Python code from {elsewhere}, without a pinned version",
                hint="save the model and that code into one folder, and name the folder",
            )


_NAMING_KERNELS = ("attn_implementation", "experts_implementation", "kernel")


def kernels_elsewhere(config: Any) -> str | None:
    """Return the name on the hub under which a configuration asks for a kernel, or None.

    A kernel is code. transformers 5 fetches some kinds, and before 5.3 any, without being allowed
    to: it only wants the name. So no form of it is accepted, at any depth.
    """
    waiting: list[tuple[Any, bool]] = [(config, False)]
    while waiting:
        value, named = waiting.pop()
        if isinstance(value, dict):
            for name, child in value.items():
                waiting.append((child, named or any(part in name for part in _NAMING_KERNELS)))
        elif isinstance(value, list):
            waiting += [(child, named) for child in value]
        elif named and isinstance(value, str) and "/" in value:
            return value
    return None


def _code_elsewhere(config: Mapping[str, Any]) -> str | None:
    """Return another repository from which a configuration loads code, or None."""
    code = config.get("auto_map")
    for names in code.values() if isinstance(code, dict) else ():
        for name in names if isinstance(names, list) else [names]:
            repository, separator, _ = str(name).partition("--")
            if separator:
                return repository
    nested = (_code_elsewhere(value) for value in config.values() if isinstance(value, dict))
    return next(filter(None, nested), None)


def check_vocabulary(source: ModelSource, report: Callable[[str], None] = lambda _: None) -> None:
    """Refuse a tokenizer with more tokens than the model: the first of them would crash it.

    One with less than half as many is reported, because it hardly belongs to the model. Added
    tokens are not counted: some models were never extended for their padding token.
    """
    embedded, tokens = model_vocabulary(source), vocabulary_size(source.path)
    if embedded is None or tokens is None:
        return
    if tokens > embedded:
        raise ModelSourceError(
            f"the tokenizer of {source.asked} has {tokens} tokens and the model only {embedded}",
            hint="use the tokenizer that belongs to the model",
        )
    if tokens < embedded / 2:
        report(
            f"the tokenizer of {source.asked} has {tokens} tokens and the model {embedded}: "
            "does it belong to the model?"
        )


def model_vocabulary(source: ModelSource) -> int | None:
    """Return the size of a model's vocabulary, if its ``config.json`` contains it."""
    if not (source.path / "config.json").is_file():
        return None
    config = source.config()
    # Multimodal models have it in the configuration of their text model.
    size = config.get("vocab_size") or _object(config.get("text_config")).get("vocab_size")
    return size if isinstance(size, int) else None


def vocabulary_size(folder: Path) -> int | None:
    """Return one more than the largest id of a tokenizer without added tokens, if known."""
    if (folder / "tokenizer.json").is_file():
        vocab = _object(read_object(folder / "tokenizer.json").get("model")).get("vocab")
    elif (folder / "vocab.json").is_file():
        vocab = read_object(folder / "vocab.json")
    elif (folder / "vocab.txt").is_file():
        # One token per line: WordPiece's ids are the line numbers.
        vocab = (folder / "vocab.txt").read_bytes().splitlines()
    else:
        return None
    if isinstance(vocab, list):
        # A unigram model's ids are the positions in its list.
        return len(vocab)
    ids = [token_id for token_id in _object(vocab).values() if isinstance(token_id, int)]
    return max(ids) + 1 if ids else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
