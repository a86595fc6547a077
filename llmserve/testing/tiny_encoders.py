"""Tiny random models with a tokenizer of their own, as transformers and others save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

CONTEXT = 48
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,+!-"
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def save_tokenizer(folder: Path) -> int:
    """Save a WordPiece tokenizer of single letters, and return the size of its vocabulary."""
    words = [*_SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "word"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    # As many models are saved: what reads it has to undo both.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    names = ("pad", "unk", "cls", "sep", "mask")
    special: dict[str, Any] = {
        f"{name}_token": token for name, token in zip(names, _SPECIAL, strict=True)
    }
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    ).save_pretrained(folder)
    return len(words)


def save_encoder(folder: Path, family: str = "bert", *, pooling: str = "", **files: Any) -> Path:
    """Save an encoder; with a ``pooling``, in the layout of sentence-transformers."""
    size = save_tokenizer(folder)
    torch.manual_seed(11)
    if family == "roberta":
        config = RobertaConfig(vocab_size=size, max_position_embeddings=CONTEXT + 2,
                               pad_token_id=1, **_SIZES)  # fmt: skip
        _save(RobertaModel(config), folder)
    else:
        config = BertConfig(vocab_size=size, max_position_embeddings=CONTEXT, **_SIZES)
        _save(BertModel(config), folder)
    if pooling:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        write(folder / "modules.json", [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds)
        ])  # fmt: skip
        (folder / "1_Pooling").mkdir()
        write(folder / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    for name, content in files.items():
        write(folder / f"{name}.json", content)
    return folder


def save_classifier(folder: Path, **settings: Any) -> Path:
    """Save a classifier; ``num_labels`` and ``id2label`` are those of its configuration."""
    size = save_tokenizer(folder)
    torch.manual_seed(12)
    config = BertConfig(vocab_size=size, max_position_embeddings=CONTEXT, **_SIZES, **settings)
    _save(BertForSequenceClassification(config), folder)
    return folder


def save_decoder(folder: Path) -> Path:
    """Save a decoder with a head for three classes, and no token for padding anywhere."""
    size = save_tokenizer(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_text(encoding="utf-8"))
            write(folder / name, {key: named[key] for key in named.keys() - {"pad_token"}})
    torch.manual_seed(13)
    config = GPT2Config(
        vocab_size=size, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, num_labels=3,
        bos_token_id=4, eos_token_id=4,
    )  # fmt: skip
    _save(GPT2ForSequenceClassification(config), folder)
    return folder


def save_graph(model: Path, *, external: bool = False) -> None:
    """Add a model's graph in ONNX's form to its folder, as many models bring it."""
    names = json.loads((model / "config.json").read_text(encoding="utf-8"))["architectures"]
    labels = names[0].endswith("ForSequenceClassification")
    loader = AutoModelForSequenceClassification if labels else AutoModel
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    example = tuple(torch.ones(2, 3, dtype=torch.int64) for _ in inputs)
    shapes = tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in inputs)
    (model / "onnx").mkdir()
    torch.onnx.export(
        loader.from_pretrained(model).eval(), example, model / "onnx" / "model.onnx",
        input_names=inputs, output_names=["logits" if labels else "last_hidden_state"],
        dynamic_shapes=shapes, verbose=False, external_data=external,
    )  # fmt: skip


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _save(model: Any, folder: Path) -> None:
    with torch.no_grad():
        # Random weights give nearly the same to every text; larger ones tell them apart.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.eval().save_pretrained(folder)
