"""Reads from a model's own files how embeddings, scores and labels are made with it.

Models for embeddings have the layout of the library sentence-transformers: ``modules.json`` lists
what follows the transformer, and each module has a folder. Only JSON is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from llmserve.builder.reading import read_json, read_object
from llmserve.builder.source import ModelSource, fetch_file
from llmserve.builder.source_files import check_vocabulary, tokenizer_files
from llmserve.errors import ModelSourceError, OptionError

if TYPE_CHECKING:
    from llmserve.builder.context import BuildContext

POOLINGS = ("mean", "cls", "last", "max")
_POOLING_FIELDS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_LATER_POOLINGS = {"lasttoken": "last", "last": "last", "mean": "mean", "cls": "cls", "max": "max"}
# These number positions from behind the padding token.
_OFFSET_POSITIONS = {
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
# One of these has what sentence-transformers says of the texts; it looks for them in this order.
_SENTENCE_FAMILIES = (
    "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet",
)  # fmt: skip
# A tokenizer without a limit says that it reads 1e30 tokens.
_NO_LIMIT = 10_000_000


@dataclass(frozen=True)
class EncoderLayout:
    """How a model's files say that embeddings are made."""

    pooling: str = "mean"
    normalize: bool = False
    size: int | None = None
    max_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def encoder_layout(source: ModelSource) -> EncoderLayout:
    """Read a model's layout; a plain transformer has the defaults of sentence-transformers."""
    modules = _modules(source)
    _check_order(source, modules)
    pooling = "mean" if modules or not _is_causal(source) else "last"
    for kind, path in modules:
        if kind == "Pooling":
            pooling = _pooling(file_of(source, f"{_inside(source, path)}/config.json"))
    prompts, default = _prompts(source)
    return EncoderLayout(
        pooling,
        any(kind == "Normalize" for kind, _ in modules),
        hidden_size(source),
        max_length(source),
        bool(_sentence_config(source).get("do_lower_case", False)),
        prompts,
        default,
    )


def _is_causal(source: ModelSource) -> bool:
    """Whether a model was made to continue texts, and its tokens see only those before them."""
    config = source.config()
    names = config.get("architectures") or [""]
    return bool(names[0].endswith("ForCausalLM") and config.get("is_causal", True))


def hidden_size(source: ModelSource) -> int | None:
    config = source.config()
    for part in (config, config.get("text_config")):
        for name in ("hidden_size", "n_embd", "d_model", "dim"):
            if isinstance(part, dict) and isinstance(size := part.get(name), int):
                return size
    return None


def max_length(source: ModelSource) -> int | None:
    """Return how many tokens a model reads, None if its files do not say it."""
    config = source.config()
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if isinstance(positions, int) and config.get("model_type") in _OFFSET_POSITIONS:
        padding = config.get("pad_token_id")
        positions -= 1 + (padding if isinstance(padding, int) else 1)
    # It goes before the tokenizer's limit, in either direction.
    named = _limit(_sentence_config(source).get("max_seq_length")) or _limit(
        _optional(source.path / "tokenizer_config.json").get("model_max_length")
    )
    return min(filter(None, (_limit(positions), named)), default=None)


def _limit(number: Any) -> int | None:
    is_limit = isinstance(number, (int, float)) and 0 < number < _NO_LIMIT
    return int(number) if is_limit else None


def _sentence_config(source: ModelSource) -> dict[str, Any]:
    files = (source.path / f"sentence_{family}_config.json" for family in _SENTENCE_FAMILIES)
    return next(filter(None, map(_optional, files)), {})


def labels_of(source: ModelSource) -> list[str]:
    """Return the names of a classifier's labels, in the order of its logits."""
    config = source.config()
    names = config.get("id2label")
    if not names:
        count = config.get("num_labels", 2)
        return [f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2)]
    try:
        by_id = {int(index): str(name) for index, name in names.items()}
        return [by_id[index] for index in range(len(by_id))]
    except (AttributeError, ValueError, KeyError):
        raise ModelSourceError(
            f"id2label in config.json of {source.asked} is not a name for each label",
            hint='it is an object such as {"0": "no", "1": "yes"}',
        ) from None


def prepare_encoder_tokenizer(context: BuildContext) -> Mapping[str, Any]:
    """Place the tokenizer, with what the model's files say about the texts that it reads."""
    check_vocabulary(context.source, context.report)
    layout = encoder_layout(context.source)
    settings: dict[str, Any] = context.place(tokenizer_files(context.source), "tokenizer")
    if layout.lowercase:
        settings["lowercase"] = True
    if layout.prompts:
        settings |= {"prompts": dict(layout.prompts), "default_prompt": layout.default_prompt}
    return settings


def prepare_embedding(context: BuildContext) -> Mapping[str, Any]:
    layout = encoder_layout(context.source)
    chosen = context.options["normalize"]
    dimensions = int(context.options["dimensions"])
    if layout.size and dimensions > layout.size:
        raise OptionError(
            f"the embeddings of {context.model} have {layout.size} numbers, not {dimensions}",
            hint="give fewer dimensions",
        )
    return {
        "size": layout.size,
        "dimensions": dimensions,
        "normalize": layout.normalize if chosen == "auto" else chosen == "true",
    }


def prepare_scores(context: BuildContext) -> Mapping[str, Any]:
    labels = labels_of(context.source)
    if len(labels) > 2:
        raise ModelSourceError(
            f"{context.model} tells {len(labels)} labels apart, and a score is made of one or two",
            hint="build it with --formatter labels",
        )
    chosen = context.options["activation"]
    if chosen == "auto":
        return {"sigmoid": is_sigmoid(context.source, context.model)}
    return {"sigmoid": chosen == "sigmoid"}


def prepare_labels(context: BuildContext) -> Mapping[str, Any]:
    labels = labels_of(context.source)
    chosen = context.options["labels"]
    kind = context.source.config().get("problem_type")
    if kind == "regression" and chosen == "auto":
        raise ModelSourceError(
            f"{context.model} computes numbers (problem_type is regression), not probabilities",
            hint="build it with --plugin rerank --set activation=none, or choose with --set "
            "labels=one or several",
        )
    several = kind == "multi_label_classification" or len(labels) == 1
    return {"labels": labels, "several": several if chosen == "auto" else chosen == "several"}


def is_sigmoid(source: ModelSource, asked: str) -> bool:
    """Return whether a model's files say that a score is the sigmoid of its single logit."""
    config = source.config()
    section = config.get("sentence_transformers")
    named = (
        # Where sentence-transformers has it since 6.0, and reads it first.
        _optional(source.path / "config_sentence_transformers.json").get("activation_fn")
        or (section.get("activation_fn") if isinstance(section, dict) else None)
        or config.get("sbert_ce_default_activation_function")
        or "Sigmoid"
    )
    name = str(named).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise ModelSourceError(
            f"{asked} makes scores with {name}, which is not supported",
            hint="choose with --set activation=sigmoid or none",
        )
    return name == "Sigmoid"


def _modules(source: ModelSource) -> list[tuple[str, str]]:
    """Return the kinds of a model's modules with their folders; none if it does not list them."""
    file = source.path / "modules.json"
    if not file.is_file():
        return []
    content = read_json(file)
    try:
        return [(_kind(str(m["type"])), str(m["path"])) for m in content]
    except (TypeError, KeyError):
        raise ModelSourceError(
            f"{file} is not a list of modules", hint="download or save it again"
        ) from None


def _inside(source: ModelSource, folder: str) -> PurePosixPath:
    """Return the path of a module's folder; refuse one that leads out of the model's."""
    path = PurePosixPath(folder)
    if path.is_absolute() or ".." in path.parts:
        raise ModelSourceError(
            f"modules.json of {source.asked} names {folder}, outside the model's folder",
            hint="download or save it again",
        )
    return path


def _kind(name: str) -> str:
    """Return a module's name without its package, unless that is someone's own."""
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _check_order(source: ModelSource, modules: list[tuple[str, str]]) -> None:
    """Refuse a model with other modules than the usual ones: its embeddings would be wrong."""
    kinds = [kind for kind, _ in modules]
    usual = (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    if kinds and kinds not in usual:
        raise ModelSourceError(
            f"{source.asked} makes embeddings with {', '.join(kinds)}, and only Transformer, "
            "Pooling and Normalize are supported",
            hint="choose another model",
        )
    if modules and modules[0][1] not in ("", "."):
        raise ModelSourceError(
            f"{source.asked} has its transformer in the folder {modules[0][1]}",
            hint="save it with a newer sentence-transformers, which puts it beside modules.json",
        )


def file_of(source: ModelSource, name: str, *, beside: Sequence[str] = ()) -> Path:
    """Return a file of a model that is not among the usual ones, such as one in a folder of it.

    ``beside`` are patterns of files that it needs, such as ``onnx/model.onnx_data``.
    """
    file = source.path / name
    # Those beside it may be missing though it is there: it may be among the usual files.
    if source.repo_id and source.revision and (beside or not file.is_file()):
        return fetch_file(
            source.repo_id,
            name,
            revision=source.revision,
            report=lambda _: None,
            beside=beside,
        )
    return file


def _pooling(file: Path) -> str:
    config = read_object(file)
    if isinstance(named := config.get("pooling_mode"), str):
        modes = {_LATER_POOLINGS.get(named)}
    else:
        set_fields = [n for n, on in config.items() if n.startswith("pooling_mode_") and on is True]
        modes = {_POOLING_FIELDS.get(name) for name in set_fields}
    pooling = next(iter(modes), None)
    if len(modes) != 1 or pooling is None:
        raise ModelSourceError(
            f"{file} asks for a pooling that is not supported",
            hint=f"only one of {', '.join(POOLINGS)} can be used",
        )
    if config.get("include_prompt") is False:
        raise ModelSourceError(
            f"{file} leaves the prompt out of the pooling, which is not supported",
            hint="choose another model",
        )
    return pooling


def _prompts(source: ModelSource) -> tuple[dict[str, str], str | None]:
    config = _optional(source.path / "config_sentence_transformers.json")
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    is_text_map = isinstance(prompts, dict) and all(isinstance(t, str) for t in prompts.values())
    if not is_text_map or not (default is None or default in prompts):
        raise ModelSourceError(
            f"the prompts in config_sentence_transformers.json of {source.asked} are not texts by "
            "name",
            hint="download or save it again",
        )
    # A model without prompts lists the usual names, with nothing to put before a text.
    return {name: text for name, text in prompts.items() if text or name == default}, default


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
