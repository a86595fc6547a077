"""Certifies our recipes, and saves a page for each.

    python -m tests.certified FOLDER [RECIPE...]     # on small models
    python -m tests.certified FOLDER --real          # hf, iterative and openvino on the real one

A small Llama with a token that begins every prompt serves where any model does, and the demo model
where a recipe needs a GPT-2 or an engine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from llmserve.contract.tasks import GENERATE
from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton
from llmserve_certify.checkpoint import opened
from llmserve_certify.checks import CHECKS
from llmserve_certify.encoder import opened_encoder
from llmserve_certify.examination import Examination
from llmserve_certify.output import as_json
from llmserve_certify.page import page, result
from llmserve_certify.run import Report, run_checks
from llmserve_certify.triton import TritonEndpoint
from llmserve_certify.verdict import Verdict
from tests.support import ROOT

_ENGINE = ROOT / "plugins/trtllm/tests/trtllm_builds/engines/1.2"
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf": ("hf", "llama", {}),
    "iterative": ("iterative", "llama", {}),
    "openvino": ("openvino", "llama", {}),
    # Of half characters, which the small Llama writes, rounded weights make other ones.
    "openvino-int8": ("openvino", "demo", {"weight_format": "int8"}),
    "gpt2-torchscript": ("gpt2-torchscript", "demo", {}),
    "gpt2-onnx": ("gpt2-onnx", "demo", {}),
    "trtllm": ("trtllm", "demo", {"engine": str(_ENGINE), "bls_instance_count": 2}),
    "vllm": ("vllm", "llama", {}),
    "embed": ("embed", "minilm", {}),
    "rerank": ("rerank", "ranker", {}),
    "classify": ("classify", "classifier", {}),
}
"""The recipe, its model and its options under the name of each page."""
_GENERATING = ("hf", "iterative", "openvino", "openvino-int8")
_REAL = (*_GENERATING, "embed")
_LABELS = {"minilm": 0, "ranker": 1, "classifier": 3}
"""The encoders, and how many labels a head of random weights gives them."""
_APART = ("vllm", *(name for name, (_, kind, _) in RECIPES.items() if kind in _LABELS))
"""What needs an environment or a download of its own."""
_SHOWN = {
    "llama": "SmolLM2-135M-Instruct",
    "demo": "demo",
    "minilm": "all-MiniLM-L6-v2",
    "ranker": "all-MiniLM-L6-v2 with a random score",
    "classifier": "all-MiniLM-L6-v2 with random labels",
}
_PRECISIONS = {"openvino-int8": "int8"}


def write_llama(folder: Path) -> Path:
    """Write a small random Llama with the demo model's tokens; a prompt begins with one of them."""
    import torch
    from tokenizers import Tokenizer, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = (
        "<s>{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        # vLLM on a CPU has no heads of 16 numbers.
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=begin,
        eos_token_id=end,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Random weights give nearly uniform scores; larger weights give clear preferences.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
        # Answers end now and then.
        model.lm_head.weight[end] *= 1.5
    model.save_pretrained(folder)
    return folder


def write_encoder(folder: Path, labels: int) -> Path:
    """Write the real encoder with as many labels, or return it as it is."""
    from tests.real.model import real_encoder

    if not labels:
        return real_encoder()
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(7)
    source = real_encoder()
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=labels)
    with torch.no_grad():
        # The head is new: larger weights tell texts apart.
        model.classifier.weight.mul_(40)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@contextmanager
def _certified(
    triton: LiveTriton, name: str, source: str, title: str, quick: bool
) -> Iterator[Report]:
    recipe, _, options = RECIPES[name]
    model = triton.build(recipe, source, name=name, **options)
    endpoint = TritonEndpoint(triton.client, model, url=triton.server.grpc_url)
    with ExitStack() as stack:
        precision = _PRECISIONS.get(name, "")
        if endpoint.task == GENERATE:
            reference = stack.enter_context(opened(source, _quietly))
            reference.name = title
            exam = Examination(endpoint, reference, precision, quick=quick)
        else:
            encoder = opened_encoder(source, endpoint.task, _quietly)
            encoder.name = title
            exam = Examination(endpoint, precision=precision, encoder=encoder)
        yield run_checks(exam, CHECKS, on_verdict=_say)


def _quietly(words: str) -> None:
    pass


def _say(verdict: Verdict) -> None:
    if verdict.state != "passed":
        print(f"  {verdict.state}: {verdict.name}: {verdict.words}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--quick", action="store_true", help="only the most telling checks")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    names = given.recipes or (_REAL if given.real else [n for n in RECIPES if n not in _APART])
    faults = 0
    with tempfile.TemporaryDirectory(prefix="llmserve-certified-") as scratch:
        sources = {"demo": "demo"}
        for kind in {RECIPES[name][1] for name in names} & _LABELS.keys():
            sources[kind] = str(write_encoder(Path(scratch) / kind, _LABELS[kind]))
        if given.real:
            from tests.real.model import converted_model

            sources["llama"] = str(converted_model())
        else:
            sources["llama"] = str(write_llama(Path(scratch) / "tiny-llama"))
        with LiveTriton.start(Path(scratch) / "model_repository") as triton:
            for name in names:
                kind = "llama" if given.real and name in _GENERATING else RECIPES[name][1]
                title = _SHOWN[kind] if given.real or kind != "llama" else "a small Llama"
                with _certified(triton, name, sources[kind], title, given.quick) as report:
                    print(f"{name}: {result(report)} ({report.seconds} s)", flush=True)
                    faults += len(report.faults)
                    stem = f"{name}-real" if given.real else name
                    (given.folder / f"{stem}.html").write_text(page(report), encoding="utf-8")
                    (given.folder / f"{stem}.json").write_text(as_json(report), encoding="utf-8")
                shutil.rmtree(triton.repository / name, ignore_errors=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
