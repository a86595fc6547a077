"""What models of the size that people have take: each is made, built and served, one by one.

    python plugins/openvino/bench/size.py [SIZE:FORMAT[:PLUGIN] …]     such as 0.5:int8 1:auto:hf

The FORMAT q4_k_m is that of a GGUF file, which stays as it is. The table has the most memory of
each phase, of all its processes together, its seconds, and those of a processor. A page that
several share counts once, as a part for each (PSS). Beside the sum is what of it no file backs: the
rest can be read again when another program needs the memory. The models are Llamas of random
weights with the tokenizer of the demo.

With --prompt TOKENS, a prompt of that length is then read beside a stream that does not end: the
seconds until its first token, now and when it comes again, those between pieces of the stream, in
the median and at most, and memory before and at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from llmserve.client import connect
from llmserve.plugin import demo_model_path

_MARK = "LLMSERVE_MEASURED"
"""The environment variable by which processes are told from others."""
_VOCABULARY = 32000
_CONTEXT = 4096
_REST_OF_CONTEXT = 1024
"""How many tokens a context has beyond a long prompt."""
_LIKELY = 100
"""How many tokens a stream chooses from."""
_STREAMED = 10
"""How many pieces a stream has had before a prompt is sent beside it."""
_SHARD = 500_000_000
_GGUF = "q4_k_m"
_GB = 1e9
_LOOKS, _REST = 3, 9
"""How often a process is looked at that is another's, and how many times as long as a look at the
memory takes nothing is looked at."""
# Billions of parameters, and the hidden size, that of the products between, layers, heads, and
# heads of keys and values, as models of these sizes have them.
_SHAPES = {
    0.1: (768, 2048, 8, 12, 4),
    0.5: (1280, 3584, 24, 20, 4),
    1.0: (2048, 5632, 20, 32, 4),
    3.0: (3072, 8192, 26, 24, 8),
    8.0: (4096, 14336, 34, 32, 8),
}
_DEFAULT = ("0.5:auto", "0.5:int8", "1:auto", "1:int8", "3:auto", "3:int8", "8:int4")


@dataclass(frozen=True)
class Memory:
    """Bytes that processes have together: all, and those that no file backs."""

    all: int = 0
    own: int = 0

    def most(self, other: Memory) -> Memory:
        return Memory(max(self.all, other.all), max(self.own, other.own))

    def __str__(self) -> str:
        return f"{self.all / _GB:5.2f} {self.own / _GB:5.2f}"


@dataclass
class Phase:
    """What a phase took."""

    seconds: float = 0.0
    peak: Memory = Memory()
    computed: dict[str, float] = field(default_factory=dict)
    """Seconds of a processor, by process."""
    before: dict[str, float] = field(default_factory=dict)

    @property
    def processor(self) -> float:
        return sum(self.computed.values()) - sum(self.before.values())

    def __str__(self) -> str:
        return f"{self.peak} {self.seconds:5.0f} {self.processor:5.0f}"


def memory_of(mark: str, others: Counter[str], computed: dict[str, float]) -> Memory:
    """Return what the processes with this mark in their environment have now.

    ``others`` counts how often a process was found to have none: one that begins has that of its
    parent until it is another program. ``computed`` gets the seconds that each has computed.
    """
    total = own = 0
    for folder in Path("/proc").glob("[0-9]*"):
        if others[folder.name] >= _LOOKS:
            continue
        with suppress(OSError):
            if mark.encode() not in (folder / "environ").read_bytes():
                others[folder.name] += 1
                continue
            text = (folder / "smaps_rollup").read_text(encoding="ascii")
            found = {name: int(kb) for name, kb in re.findall(r"(?m)^(Pss\w*):\s*(\d+) kB", text)}
            times = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            computed[folder.name] = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
            total += found["Pss"]
            own += found["Pss_Anon"] + found["Pss_Shmem"]
    return Memory(total << 10, own << 10)


@dataclass(frozen=True)
class LongPrompt:
    """What a long prompt took, and cost the stream beside it."""

    tokens: int
    first: float
    again: float
    gaps: Sequence[float]
    """Seconds between pieces of the stream while the prompt was read for the first time."""
    before: Memory
    peak: Memory

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: the first one after {self.first:.1f} s, "
            f"again {self.again:.1f}; "
            f"a stream beside it waited {statistics.median(self.gaps):.2f} s in the median and "
            f"{max(self.gaps):.2f} at most; {self.before.own / _GB:.2f} GB before, "
            f"{self.peak.own / _GB:.2f} at most"
        )


@contextmanager
def measured(mark: str) -> Iterator[Phase]:
    """Measure the processes with a mark for as long as the block runs."""
    phase, ended, began = Phase(), Event(), time.monotonic()
    others: Counter[str] = Counter()
    phase.peak = memory_of(mark, others, phase.before)
    phase.computed = {**phase.before}

    def watch() -> None:
        took = 0.0
        # Counting the pages of a large process takes time, in which it gets no new ones.
        while not ended.wait(max(0.1, _REST * took)):
            looked = time.monotonic()
            phase.peak = phase.peak.most(memory_of(mark, others, phase.computed))
            took = time.monotonic() - looked

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield phase
    finally:
        ended.set()
        watcher.join()
        phase.seconds = time.monotonic() - began


def make_model(folder: Path, size: float, context: int = _CONTEXT) -> None:
    """Write a model of random weights in bfloat16, tensor by tensor."""
    hidden, between, layers, heads, key_heads = _SHAPES[size]
    folder.mkdir(parents=True)
    for path in demo_model_path().iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "generation")):
            shutil.copyfile(path, folder / path.name)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "vocab_size": _VOCABULARY, "hidden_size": hidden, "intermediate_size": between,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "max_position_embeddings": context,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_shards(folder, _tensors(size))


def _tensors(size: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights, by their names in transformers."""
    hidden, between, layers, heads, key_heads = _SHAPES[size]
    width = key_heads * hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (_VOCABULARY, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (hidden, hidden),
            f"{prefix}.self_attn.k_proj": (width, hidden),
            f"{prefix}.self_attn.v_proj": (width, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, hidden),
            f"{prefix}.mlp.gate_proj": (between, hidden),
            f"{prefix}.mlp.up_proj": (between, hidden),
            f"{prefix}.mlp.down_proj": (hidden, between),
            f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
        }
    return {**shapes, "model.norm": (hidden,), "lm_head": (_VOCABULARY, hidden)}


def make_gguf(file: Path, size: float, context: int = _CONTEXT) -> None:
    """Write a GGUF file of random blocks, mixed as in Q4_K_M."""
    hidden, between, layers, heads, key_heads = _SHAPES[size]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(between)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(_VOCABULARY)
    content = json.loads((demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"))
    words = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    others = [f"<unused {number}>" for number in range(_VOCABULARY - len(words))]
    merges = content["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, *others])
    writer.add_token_types([1] * len(words) + [5] * len(others))
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    shapes = {f"{names.get_name(name)}.weight": shape for name, shape in _tensors(size).items()}
    kinds = {name: _kind(name, layers) for name, shape in shapes.items() if len(shape) > 1}
    for name, shape in shapes.items():
        if kind := kinds.get(name):
            rows = gguf.quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), int(np.prod(rows)), kind)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    chance = np.random.default_rng(1)
    for name, shape in shapes.items():
        values = np.ones(shape, np.float32)
        writer.write_tensor_data(_blocks(shape, kinds[name], chance) if name in kinds else values)
    writer.close()


def _kind(name: str, layers: int) -> gguf.GGMLQuantizationType:
    """Return the type that llama.cpp gives a tensor in a Q4_K_M file."""
    six, four = gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.Q4_K
    if not name.startswith("blk."):
        return six if name.startswith("output.") else four
    layer, eighth = int(name.split(".")[1]), layers // 8
    is_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    return six if is_more and ("attn_v" in name or "ffn_down" in name) else four


def _blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, chance: Any) -> Any:
    """Return blocks whose numbers are by chance, with a scale as weights have it."""
    rows = gguf.quant_shape_to_byte_shape(shape, kind)
    _, length = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(chance.bytes(int(np.prod(rows))), np.uint8).reshape(-1, length).copy()
    # A number is about 8 steps from the smallest, a factor about half of the largest.
    if kind == gguf.GGMLQuantizationType.Q4_K:
        blocks[:, :4] = np.array([0.02 / 256, 0.02 / 32], np.float16).view(np.uint8)
    else:
        blocks[:, -2:] = np.array([0.02 / 1024], np.float16).view(np.uint8)
    return blocks.reshape(rows)


def _write_shards(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        values = torch.ones(shape) if len(shape) == 1 else None
        if values is None:
            values = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        shard[f"{name}.weight"] = values.bfloat16()
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD:
            write()
    write()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def build(
    model: Path, repository: Path, plugin: str, chosen: str, mark: str, log: Any, *, data: int = 0
) -> Phase:
    """Build a model, with its weights in a format if the plugin has such an option.

    With ``data``, none of its processes may have more bytes of memory that no file backs.
    """
    options = [f"--weight-format={chosen}"] if plugin == "openvino" else [f"--dtype={chosen}"]
    if chosen == _GGUF:
        options = ["--name=model"]
    words = ["build", "--plugin", plugin, "--model", str(model), "--output", str(repository)]
    command = _command(*words, *options)
    if data:
        command = ["sh", "-c", f'ulimit -d {data >> 10} && exec "$@"', "sh", *command]
    with measured(mark) as phase:
        subprocess.run(command, env=_environment(mark), check=True, stdout=log, stderr=log)
    return phase


def stored(repository: Path) -> int:
    """Return what the files of a repository take."""
    return sum(file.stat().st_size for file in repository.rglob("*") if file.is_file())


def serve(
    repository: Path, mark: str, log: Any, *, prompt: int = 0
) -> tuple[Phase, Phase, LongPrompt | str]:
    """Serve what was built and have it answer; return what loading and answering took.

    With ``prompt``, a prompt of so many tokens is read as well, instead of keeping the answer.
    """
    words = ["serve", str(repository), "--frontend", "none"]
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    with ExitStack() as stack:
        with measured(mark) as loading:
            server = subprocess.Popen(
                _command(*words, *ports), env=_environment(mark), stdout=log,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(_end, server)
            url = _grpc_url(server, log)
        drain = Thread(target=lambda: log.writelines(server.stderr or ()))
        drain.start()
        stack.callback(drain.join)
        stack.callback(server.terminate)
        with measured(mark) as answering:
            found = subprocess.run(
                _command("query", "model", "Once upon a time", "--url", url, "--max-tokens", "32"),
                check=True, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        return loading, answering, read(url, mark, prompt) if prompt else found.stdout


def read(url: str, mark: str, tokens: int) -> LongPrompt:
    """Have a prompt of so many tokens read, beside a stream that does not end."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    words = {word: id for word, id in tokenizer.get_vocab().items() if word.isalpha()}
    text = _text_of(tokens, tokenizer, list(words))
    # The model has tokens that the tokenizer lacks: of such a one, a stream would show nothing.
    likely = dict.fromkeys(list(words.values())[:_LIKELY], 100.0)
    times: list[float] = []
    ended = Event()

    def stream() -> None:
        options: dict[str, Any] = {
            "max_tokens": _CONTEXT // 2, "ignore_eos": True, "logit_bias": likely
        }  # fmt: skip
        with connect(url) as client:
            while not ended.is_set():
                for _ in client.stream("model", "Once upon a time", **options):
                    times.append(time.monotonic())
                    if ended.is_set():
                        break

    def first_token() -> tuple[float, float]:
        began = time.monotonic()
        with connect(url) as client:
            client.generate("model", text, max_tokens=1)
        return began, time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream)
        try:
            while len(times) < _STREAMED and not streaming.done():
                time.sleep(0.1)
            with measured(mark) as phase:
                before = phase.peak
                began, found = first_token()
            again = first_token()
        finally:
            ended.set()
        streaming.result()
    beside = [each for each in times if began <= each <= found]
    gaps = [later - earlier for earlier, later in pairwise([began, *beside])]
    return LongPrompt(tokens, found - began, again[1] - again[0], gaps, before, phase.peak)


def _text_of(tokens: int, tokenizer: Any, words: Sequence[str]) -> str:
    """Return a text of so many tokens."""
    chance = random.Random(1)
    text = " ".join(chance.choice(words) for _ in range(tokens))
    return str(tokenizer.decode(tokenizer.encode(text).ids[:tokens]))


def _grpc_url(server: Any, log: Any) -> str:
    url = ""
    for line in server.stderr:
        log.write(line)
        if found := re.match(r"  grpc +(\S+)", line):
            url = found[1]
        if line.startswith("Ctrl-C"):
            return url
    raise RuntimeError("the server has ended, see the log")


def _end(server: Any) -> None:
    server.terminate()
    server.wait()


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "llmserve_cli", *words]


def _environment(mark: str) -> dict[str, str]:
    return {**os.environ, _MARK: mark}


HEADER = (
    f"{'model':<26} {'stored':>6} {'build':>11} {'s':>5} {'cpu':>5} {'load':>11} {'s':>5} "
    f"{'cpu':>5} {'answer':>11} {'s':>5} {'cpu':>5}  GB: all, and of that without a file"
)


def measure(
    folder: Path,
    cases: Sequence[tuple[float, str, str]],
    tell: Callable[[str], None],
    *,
    prompt: int = 0,
) -> None:
    """Measure one model after the other, and tell a row of each."""
    tell(HEADER)
    context = max(_CONTEXT, prompt + _REST_OF_CONTEXT if prompt else 0)
    for size, plugin, chosen in cases:
        with tempfile.TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
            is_gguf, repository = chosen == _GGUF, Path(place, "repository")
            made = folder / (
                f"llama-{size:g}" if context == _CONTEXT else f"llama-{size:g}-{context}"
            )
            model = made / ("model.gguf" if is_gguf else "model")
            if not model.exists():
                (make_gguf if is_gguf else make_model)(model, size, context)
            name = f"{size:g} B {plugin} {chosen}"
            log = stack.enter_context((folder / f"{name.replace(' ', '-')}.log").open("w"))
            mark = secrets.token_hex(8)
            built = build(model, repository, plugin, chosen, mark, log)
            size_on_disk = stored(repository) / _GB
            loading, answering, found = serve(repository, mark, log, prompt=prompt)
            tell(f"{name:<26} {size_on_disk:6.2f} {built} {loading} {answering}")
            if prompt:
                tell(f"  {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=_DEFAULT, metavar="SIZE:FORMAT[:PLUGIN]")
    parser.add_argument("--folder", type=Path, help="keep models and logs there")
    parser.add_argument("--prompt", type=int, default=0, metavar="TOKENS", help="read one as well")
    arguments = parser.parse_args()
    cases = [(*case.split(":"), "openvino")[:3] for case in arguments.cases]
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        ordered = [(float(size), plugin, chosen) for size, chosen, plugin in cases]
        measure(folder, ordered, lambda row: print(row, flush=True), prompt=arguments.prompt)


if __name__ == "__main__":
    main()
