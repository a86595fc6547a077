"""Repositories as Triton's tutorials and backends have them, without their weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

_TEXT = 'name: "text_input" data_type: TYPE_STRING dims: [ -1 ]'
_ANSWER = 'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]'
_PIPELINE = """\
import json
import torch
import transformers


class TritonPythonModel:
    def initialize(self, args):
        self.model_params = json.loads(args["model_config"]).get("parameters", {})
        default_hf_model = "meta-llama/Llama-2-7b-chat-hf"
        hf_model = self.model_params.get("huggingface_model", {}).get(
            "string_value", default_hf_model
        )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(hf_model)
        self.pipeline = transformers.pipeline(
            "text-generation", model=hf_model, torch_dtype=torch.float16,
            tokenizer=self.tokenizer, device_map="auto",
        )
"""
_ITERATIVE = """\
from transformers import GPT2LMHeadModel, GPT2Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = GPT2Tokenizer.from_pretrained("gpt2")
        self.model = GPT2LMHeadModel.from_pretrained("gpt2")

    @staticmethod
    def auto_complete_config(config):
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(8)
        return config
"""


def write(root: Path, name: str, config: str, **files: str) -> None:
    """Write a model; a file is named by its name with __ for the dot."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config, encoding="utf-8")
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text, encoding="utf-8")


def falcon(root: Path) -> None:
    """Of *Deploying Hugging Face Transformer Models*."""
    write(
        root, "falcon7b",
        'backend: "python"\nparameters: {\n  key: "huggingface_model",\n'
        '  value: {string_value: "tiiuae/falcon-7b"}\n}\nparameters: {\n'
        '  key: "max_output_length",\n  value: {string_value: "15"}\n}\n'
        f"input [ {{ {_TEXT} }} ]\n{_ANSWER}\n",
        model__py=_PIPELINE,
    )  # fmt: skip


def llama_python(root: Path) -> None:
    """Of *Serving with Triton Inference Server*."""
    write(
        root, "llama_python",
        'backend: "python"\nparameters: {\n  key: "huggingface_model",\n'
        '  value: {string_value: "/workspace/meta/hf-weights/7B-chat"}\n}\n'
        f'input [ {{ {_TEXT} }}, {{ name: "max_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }} ]\n'
        f"{_ANSWER}\ninstance_group [ {{ count: 1 kind: KIND_GPU gpus: [ 0 ] }} ]\n",
        model__py=_PIPELINE,
    )  # fmt: skip


def tensorrt(root: Path) -> None:
    """The ensemble of *Batching Scheduling*, with its placeholders filled in."""
    write(root, "preprocessing", 'backend: "python"\nparameters { key: "tokenizer_dir" value: '
          '{ string_value: "/workspace/meta/llama_models" } }\n')  # fmt: skip
    write(root, "postprocessing", 'backend: "python"\n')
    write(
        root, "tensorrt_llm",
        'backend: "tensorrtllm"\nmax_batch_size: 128\n'
        'parameters: { key: "gpt_model_type" value: { string_value: "V1" } }\n'
        'parameters: { key: "gpt_model_path" value: { string_value: "/engines/fp16-1gpu" } }\n'
        'parameters: { key: "batch_scheduler_policy" value: { string_value: '
        '"guaranteed_completion" } }\n'
        'parameters: { key: "max_beam_width" value: { string_value: "2" } }\n',
    )  # fmt: skip
    steps = " ".join(
        f'step {{ model_name: "{name}" model_version: -1 }}'
        for name in ("preprocessing", "tensorrt_llm", "postprocessing")
    )
    write(
        root, "ensemble",
        f'platform: "ensemble"\nmax_batch_size: 128\ninput [ {{ {_TEXT} }} ]\n{_ANSWER}\n'
        f"ensemble_scheduling {{ {steps} }}\n",
    )  # fmt: skip
    llama_python(root)


def iterative(root: Path) -> None:
    """Of *Deploying GPT-2 using Python Backend and Iterative Scheduling*."""
    write(
        root, "iterative-gpt2",
        'backend: "python"\nsequence_batching {\n  iterative_sequence: true\n  oldest {}\n}\n'
        "instance_group [ { count: 1 kind: KIND_GPU } ]\n",
        model__py=_ITERATIVE,
    )  # fmt: skip
    write(root, "simple-gpt2", 'backend: "python"\n', model__py=_ITERATIVE)


def sequences(root: Path) -> None:
    """Of *Sequence Batcher with GPT2*."""
    batcher = "sequence_batching { direct { minimum_slot_utilization: 1 } }\n"
    write(root, "tokenizer", f'backend: "python"\nmax_batch_size: 4\n{batcher}')
    write(root, "generator_onnx", 'platform: "onnxruntime_onnx"\nmax_batch_size: 16\n')
    write(root, "detokenizer", 'backend: "python"\nmax_batch_size: 16\n')
    steps = " ".join(
        f'step {{ model_name: "{name}" model_version: -1 }}'
        for name in ("tokenizer", "generator_onnx", "detokenizer")
    )
    write(
        root, "ensemble_pipeline",
        'platform: "ensemble"\nmax_batch_size: 4\n'
        'input [ { name: "INPUT_TOKENS" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        'output [ { name: "NEXT_TOKENS" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
        f"ensemble_scheduling {{ {steps} }}\n",
    )  # fmt: skip


def vllm(root: Path) -> None:
    """The example of vLLM's backend."""
    arguments = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.1,
                 "enforce_eager": True, "max_logprobs": 7}  # fmt: skip
    write(root, "vllm_model", 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n',
          model__json=json.dumps(arguments, indent=4))  # fmt: skip


def foreign(root: Path) -> None:
    """A model of nobody's layout."""
    write(root, "shouter", f'backend: "python"\ninput [ {{ {_TEXT} }} ]\n{_ANSWER}\n',
          model__py="class TritonPythonModel:\n    pass\n")  # fmt: skip


REPOSITORIES: Mapping[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (falcon, llama_python, tensorrt, iterative, sequences, vllm, foreign)
}
