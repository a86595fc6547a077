"""Writes docs/reference/architectures.md: which kinds of models three plugins compute.

Each kind of causal model that transformers has is made small and random, and ``iterative`` and
``openvino`` compute texts with it, together and in pieces, beyond its windows, as a server does;
``hf`` continues them together. They have to compute what transformers itself does for each text
alone.

    python -m plugins.tools.architectures [--write] [--only PLUGIN] [KIND ...]
    python -m plugins.tools.architectures --save FOLDER KIND ...

With kinds, ``--write`` changes their rows of the page alone, and with a plugin, its column.
``--save`` tries none: it writes them with the demo's tokenizer into folders of their names, so that
they can be built and served.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
_WINDOW = 128
_FAR, _NEAR = (200, 150, 20), (100, 44, 13)
_TOLERANCE = 0.02
_LONGEST = 120
"""Seconds that one kind may take."""
WHOLE = "whole context"
_WITHIN = f"{_WINDOW} of its tokens, as far as it attends or rotates one way"
_PLUGINS = ("hf", "iterative", "openvino")
_ONE_BY_ONE = f"{WHOLE}, texts of different lengths one by one"
_AS_GENERATED = "as generate() alone, which differs from one pass over the text"
_ANSWER = 8
"""How many tokens ``hf`` continues a text by."""
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")


def kinds() -> list[str]:
    """Return every kind of model that continues texts."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    others = {kind for group in data()["no_generators"].values() for kind in group}
    return [kind for kind in NAMES if kind not in others]


def variants() -> list[str]:
    """Return kinds with settings of released checkpoints that others of the kind do not have."""
    return [*data()["variants"]]


def data() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return content


def small_model(kind: str) -> Any:
    """Return a small random model of a kind, with clear preferences."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
        if parameter.ndim > 1 and 0.002 < spread < 0.06:
            parameter.data.mul_(0.12 / spread)
        elif parameter.ndim == 1 and spread < 0.03:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def save(kind: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    from llmserve.plugin import demo_model_path

    small_model(kind).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(folder)


def _config(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    make = CONFIG_MAPPING[kind.partition("+")[0]]
    defaults = make().to_dict()
    if not isinstance(defaults.get("text_config"), dict):
        return make(**_settings(kind, defaults))
    # A model of several parts: its text part as its own kind has it.
    text = defaults["text_config"]
    chosen: dict[str, Any] = {"text_config": _settings(text["model_type"], text)}
    sizes = data()["parts"]
    for part in ("vision_config", "audio_config"):
        own = defaults.get(part)
        if isinstance(own, dict):
            fitting = {n: v for n, v in sizes.items() if n in own and _is_alike(own[n], v)}
            chosen[part] = {**fitting, "model_type": own["model_type"]}
    marks = [name for name in sorted(defaults) if name.endswith(("_token_id", "_token_index"))]
    for number, name in enumerate(name for name in marks if isinstance(defaults[name], int)):
        chosen[name] = 1491 + number % 8
    return make(**{**chosen, **data()["of"].get(kind, {})})


def _is_alike(default: Any, value: Any) -> bool:
    return isinstance(value, list) or not isinstance(default, (list, tuple))


def _settings(kind: str, defaults: dict[str, Any]) -> dict[str, Any]:
    content = data()
    base = kind.partition("+")[0]
    own = {**content["of"].get(base, {}), **content["variants"].get(kind, {})}
    sizes = {name: value for name, value in content["sizes"].items() if name in defaults}
    count = own.get("num_hidden_layers", sizes.get("num_hidden_layers", 4))
    for name in _BY_LAYER:
        if (types := defaults.get(name)) and all(isinstance(each, str) for each in types):
            seen = list(dict.fromkeys(types))
            sizes[name] = [seen[layer % len(seen)] for layer in range(count)]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = defaults.get(name)
        if isinstance(value, list) or (isinstance(value, int) and value >= sizes["vocab_size"]):
            sizes[name] = 0
    if "qk_rope_head_dim" in defaults:
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 4
    if defaults.get("tie_word_embeddings"):
        sizes["tie_word_embeddings"] = False
    return {**sizes, **own}


def found_with(model: Any, runner_of: Callable[[], Any], expected: dict[str, Any]) -> str:
    """Return how far a runner computes what the model does."""
    from llmserve.runtime.causal import off_by, random_texts, scores

    runner = runner_of()
    worst = 0.0
    for words, lengths in ((WHOLE, _FAR), (_WITHIN, _NEAR)):
        texts = random_texts(model.config, lengths)
        worst = max(map(off_by, scores(runner, texts), expected[words]))
        if worst < _TOLERANCE:
            return words
    return f"differs by {worst:.2g}"


def found_with_hf(model: Any) -> str:
    """Return whether texts are continued together as the model continues each."""
    import torch

    from llmserve.runtime.causal import random_texts
    from llmserve.testing import ByteTokenizer
    from llmserve.testing.fake import generation
    from llmserve_hf.generator import TransformersGenerator

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = {"path": ".", "device": "cpu", "dtype": "float32"}
        generator = TransformersGenerator(settings, Path(folder))
    texts = random_texts(model.config, _CONTINUED)

    def continued(*texts: list[int]) -> list[Any]:
        asked = [generation(text, _ANSWER, decode=lambda _: "", logprobs=1) for text in texts]
        generator.generate(asked, ByteTokenizer())
        return asked

    asked, worst = continued(*texts), 0.0
    for each in asked:
        ids = each.prompt_ids + each.token_ids
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0, -_ANSWER:]
        scores = logits.float().log_softmax(-1)
        for row, token, found in zip(scores, each.token_ids, each.logprobs, strict=True):
            worst = max(worst, abs(float(row[token]) - found.value), float(row.max() - row[token]))
    if not worst < _TOLERANCE:
        # Some are computed otherwise with a cache by transformers itself.
        alone = [each.token_ids for text in texts for each in continued(text)]
        is_alike = [each.token_ids for each in asked] == alone
        return _AS_GENERATED if is_alike else f"differs by {worst:.2g}"
    return _ONE_BY_ONE if generator.is_alone else WHOLE


def tried(kind: str, plugins: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield how far each plugin computes a kind of model, or why it does not; the last is whole."""
    import torch

    from llmserve.graphs import StoredWeights
    from llmserve.runtime.causal import pages_of, random_texts
    from llmserve_iterative.runner import make_runner
    from llmserve_openvino.passes import PAGE_SIZE
    from llmserve_openvino.runner import make_runner as make_openvino
    from llmserve_openvino.trace import convert
    from llmserve_openvino.trial import refusals

    model = small_model(kind)
    texts = {words: random_texts(model.config, n) for words, n in _LENGTHS.items()}
    with torch.inference_mode():
        expected = {
            words: [model(input_ids=torch.tensor([text])).logits[0] for text in each]
            for words, each in texts.items()
        }
    tokens = 32 * pages_of(texts[WHOLE], 32)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

    def on_openvino() -> Any:
        own = deepcopy(model)
        stored = StoredWeights(own)
        return make_openvino(
            convert(own, stored), exact, cache_tokens=max(tokens, PAGE_SIZE), sequences=3
        )

    def with_openvino() -> str:
        with refusals(model.config.get_text_config()):
            return found_with(model, on_openvino, expected)

    def on_iterative() -> Any:
        return make_runner(deepcopy(model), tokens)

    ways: dict[str, Callable[[], str]] = {
        "hf": lambda: found_with_hf(deepcopy(model)),
        "iterative": lambda: found_with(model, on_iterative, expected),
        "openvino": with_openvino,
    }
    found = dict.fromkeys(plugins, "no: it ends its process")
    for plugin in plugins:
        found |= {plugin: _words_of(ways[plugin])}
        yield found


_LENGTHS = {WHOLE: _FAR, _WITHIN: _NEAR}
_CONTINUED = (120, 44, 200, 13)


def _words_of(ask: Callable[[], str]) -> str:
    from llmserve.plugin import LLMServeError

    try:
        return ask()
    except LLMServeError as error:
        return f"no: {error.problem}"
    except Exception as error:
        return f"no: {type(error).__name__}: {str(error).strip().splitlines()[-1][:100]}"


def rows(
    chosen: Sequence[str], plugins: Sequence[str] = _PLUGINS
) -> Iterator[tuple[str, dict[str, str]]]:
    """Try each kind in a process of its own: some end it."""
    # Imported once, and not by each process.
    for module in (
        "torch", "transformers", "llmserve_openvino.trace", "llmserve_iterative.runner",
        "llmserve_hf.generator",
    ):  # fmt: skip
        import_module(module)
    for kind in chosen:
        with tempfile.NamedTemporaryFile() as file:
            if not (child := os.fork()):
                _answer(kind, plugins, Path(file.name))
            os.waitpid(child, 0)
            text = Path(file.name).read_text(encoding="utf-8")
        yield kind, json.loads(text or '{"made": "it ends its process"}')


def _answer(kind: str, plugins: Sequence[str], place: Path) -> None:
    # One that computes for ever is ended as well.
    signal.alarm(_LONGEST)
    try:
        warnings.simplefilter("ignore")
        try:
            for found in tried(kind, plugins):
                place.write_text(json.dumps(found), encoding="utf-8")
        except Exception as error:
            found = {"made": f"not made: {type(error).__name__}"}
            place.write_text(json.dumps(found), encoding="utf-8")
    finally:
        os._exit(0)


def page(found: dict[str, dict[str, str]]) -> str:
    """Return the page of what was found."""
    import openvino
    import transformers

    made = {kind: row for kind, row in found.items() if "made" not in row}
    lines = [
        "# Architectures",
        "",
        "What `hf`, `iterative` and `openvino` compute of each kind of causal model that "
        f"transformers {transformers.__version__} has, with OpenVINO "
        f"{openvino.__version__.split('-')[0]}. Each was made small and random, and computed "
        "texts together, in pieces, beyond its windows; "
        "*whole context* means that the log-probabilities are those of the model itself for each "
        "text alone. A build tries a small model of its own, and refuses by name what is not "
        "computed. `make architectures` writes this page.",
        "",
        "| | whole context | a part of it | not | differs |",
        "|---|---|---|---|---|",
    ]
    rows = {kind: row for kind, row in made.items() if "+" not in kind}
    for plugin in _PLUGINS:
        counted = Counter(_class_of(row[plugin]) for row in rows.values() if plugin in row)
        counts = " | ".join(str(counted[name]) for name in (WHOLE, "part", "no", "differs"))
        lines.append(f"| `{plugin}` | {counts} |")
    lines += _table(rows)
    if left_out := sorted({*kinds()} - made.keys()):
        lines += ["", f"Not tried, or not made for want of a package: {', '.join(left_out)}."]
    lines += [
        "",
        "## Variants",
        "",
        "The same kinds with settings that some checkpoints have: other positions, a window or "
        "none, capped scores or none, the table of tokens as the last product.",
        *_table({kind: row for kind, row in made.items() if "+" in kind}),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: dict[str, dict[str, str]]) -> list[str]:
    lines = ["", f"| kind | {' | '.join(f'`{each}`' for each in _PLUGINS)} |"]
    lines.append(f"|---{'|---' * len(_PLUGINS)}|")
    for kind, row in sorted(rows.items()):
        cells = [cell(row.get(plugin, "not tried")) for plugin in _PLUGINS]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def listed() -> dict[str, dict[str, str]]:
    """Return the rows that the page has."""
    lines = (line[2:-2].split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    table = [cells for cells in lines if len(cells) == 1 + len(_PLUGINS)]
    known = [*kinds(), *variants()]
    rows = {kind: dict(zip(_PLUGINS, cells, strict=True)) for kind, *cells in table}
    return {kind: row for kind, row in rows.items() if kind in known}


def cell(words: str) -> str:
    """Return what the page says, without details that a message has in brackets."""
    return words.partition(" (")[0].replace("|", "/")


def _class_of(words: str) -> str:
    return {WHOLE: WHOLE, _ONE_BY_ONE: WHOLE, _AS_GENERATED: WHOLE, _WITHIN: "part"}.get(
        words, words.partition(" ")[0].rstrip(":")
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=_PLUGINS, action="append")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    asked = parser.parse_args(arguments)
    if asked.save is not None:
        for kind in asked.kinds:
            save(kind, asked.save / kind)
        return
    found = listed()
    for kind, row in rows(asked.kinds or [*kinds(), *variants()], asked.only or _PLUGINS):
        found[kind] = {**found.get(kind, {}), **row} if asked.only else row
        sys.stdout.write(f"{kind}\t{json.dumps(row)}\n")
        sys.stdout.flush()
    if asked.write or not asked.kinds:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
