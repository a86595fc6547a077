"""Reads a model repository of Triton: each of its models is of one of a few layouts, or unknown."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError
from llmserve.plugin import Model, Repository
from llmserve_cli.adopting.adopted import Adopted, AdoptedModel, Origin, Remark, Value, shown
from llmserve_cli.adopting.engines import engine_named
from llmserve_cli.adopting.launch import Launch, adopt_launch, locate, model_name
from llmserve_cli.adopting.source_text import (
    SourceText,
    is_inside,
    read_json,
    read_source,
)
from llmserve_cli.adopting.words import Word

_CONFIG = "config.pbtxt"
_PLACEHOLDER = re.compile(r"\$\{\w*\}?")
_TEXTS = frozenset({"TYPE_STRING"})
_DEFAULT_LENGTH = 15
_GRAPHS = {"onnxruntime": "gpt2-onnx", "pytorch": "gpt2-torchscript"}
_TRTLLM_ALIASES = {
    "gpt_model_path": "engine_at", "batch_scheduler_policy": "scheduler",
    "decoupled_mode": "decoupled",
}  # fmt: skip


@dataclass
class _Code:
    """What a ``model.py`` says about the model that it loads, read and not run."""

    model: str = ""
    line: int = 0
    dtype: str = ""
    dtype_line: int = 0
    sampling: list[tuple[str, int]] = field(default_factory=list)
    is_decoupled: bool = False
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Found:
    """A model of the repository, with what its reader needs."""

    model: Model
    config: Any
    path: str
    """The place of its folder, as it is shown."""
    text: SourceText
    """Its ``config.pbtxt``."""
    code: _Code
    repository: Repository

    @property
    def inputs(self) -> dict[str, str]:
        return {each.name: _type(each) for each in self.config.input}

    @property
    def outputs(self) -> dict[str, str]:
        return {each.name: _type(each) for each in self.config.output}

    @property
    def parameters(self) -> dict[str, str]:
        return {key: value.string_value for key, value in self.config.parameters.items()}

    @property
    def backend(self) -> str:
        return str(self.config.backend or self.config.platform.partition("_")[0])

    def origin(self, text: str, needle: str = "") -> Origin:
        return Origin(f"{self.path}/{_CONFIG}", self.text.line_of(needle or text), text)

    def code_origin(self, text: str, line: int = 0) -> Origin:
        return Origin(f"{self.path}/1/model.py", line or self.code.line, text)


def _type(tensor: Any) -> str:
    field_of = tensor.DESCRIPTOR.fields_by_name["data_type"]
    found = field_of.enum_type.values_by_number.get(tensor.data_type)
    return found.name if found else ""


def is_repository(folder: Path) -> bool:
    """Return whether a folder has models of Triton, or is one."""
    if (folder / _CONFIG).is_file():
        return True
    with suppress(OSError):
        return any((each / _CONFIG).is_file() for each in folder.iterdir() if each.is_dir())
    return False


def read_repository(folder: Path, shown_as: str) -> Adopted:
    """Read all models of a repository; parts of another model belong to that one."""
    if (folder / _CONFIG).is_file():
        models = [Model(folder)]
        root, shown_as = folder, str(Path(shown_as).parent)
        repository = Repository(folder.parent, {folder.name: models[0]})
    else:
        repository, root = Repository.open(folder), folder
        models = [model for model in repository if (model.folder / _CONFIG).is_file()]
    adopted = Adopted("a model repository of Triton")
    found = [
        each for model in models if (each := _read(model, root, shown_as, repository, adopted))
    ]
    parts = {
        step.model_name for each in found for step in each.config.ensemble_scheduling.step
    }  # fmt: skip
    for each in found:
        if each.model.name not in parts or not _belongs(each):
            _adopt(each, {other.model.name: other for other in found}, adopted)
    if adopted.kept and not adopted.models:
        # Nothing is built beside them, so they can be served where they are.
        where = str(repository.path.absolute())
        adopted.repository = Value(where, Origin(shown_as, 0, "all of it goes on as it is"))
    else:
        adopted.texts.clear()
    return adopted


def _belongs(found: _Found) -> bool:
    """Return whether a step of an ensemble is nothing without it, as a tokenizer is."""
    return not ({"text_input"} <= found.inputs.keys() and "text_output" in found.outputs)


def _read(
    model: Model, root: Path, shown_as: str, repository: Repository, adopted: Adopted
) -> _Found | None:
    path = str(Path(shown_as) / model.name)
    place = Origin(path, 0, "")
    if not is_inside(model.folder, root):
        adopted.miss(place, "it is a link out of the repository, and was not followed")
        return None
    try:
        text = read_source(model.folder / _CONFIG, f"{path}/{_CONFIG}")
        if not is_inside(model.folder / _CONFIG, root):
            adopted.miss(place, "its configuration is a link out of the repository")
            return None
        unfilled = ", ".join(dict.fromkeys(_PLACEHOLDER.findall(text.text)))
        if unfilled:
            adopted.miss(Origin(f"{path}/{_CONFIG}", text.line_of("${"), shown(unfilled)),
                         "a placeholder that was not filled in")  # fmt: skip
        if model.config is None:
            raise model.config_damage or ConfigError(f"{path} has no configuration")
        code = _read_code(model.folder / "1" / "model.py", root)
    except ConfigError as error:
        adopted.miss(place, error.problem)
        return None
    return _Found(model, model.config, path, text, code, repository)


def _adopt(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    if found.model.manifest is not None:
        adopted.kept.append(found.model.name)
        adopted.unneeded.append(
            Remark(Origin(found.path, 0, "built by llmserve"), "llmserve serve takes it as it is")
        )
        return
    for layout in LAYOUTS:
        if layout.fits(found, others):
            layout.read(found, others, adopted)
            return
    _keep(found, adopted)


def _keep(found: _Found, adopted: Adopted) -> None:
    """A model of no known layout goes on as it is; say what a build would need to know."""
    adopted.kept.append(found.model.name)
    texts = [name for name, kind in found.inputs.items() if kind in _TEXTS]
    answers = [name for name, kind in found.outputs.items() if kind in _TEXTS]
    if len(texts) == len(answers) == 1:
        adopted.texts[found.model.name] = (
            Value(texts[0], found.origin(f"input {texts[0]}", texts[0])),
            Value(answers[0], found.origin(f"output {answers[0]}", answers[0])),
        )
    needs = []
    if not found.code.model:
        needs.append("its code names no model of transformers")
    if not texts or not answers:
        needs.append("it has no text in, or no text out")
    adopted.miss(
        Origin(found.path, 0, f"{found.backend or 'no'} backend"),
        f"it goes on as it is ({', '.join(needs) or 'it is of no known layout'}): llmserve serve "
        f"{found.repository.path}",
    )


def _read_code(path: Path, root: Path) -> _Code:
    """Find the model that a ``model.py`` loads; its text is parsed, and nothing is run."""
    code = _Code()
    if not path.is_file() or not is_inside(path, root):
        return code
    try:
        text = read_source(path).text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (ConfigError, SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return code
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _read_call(node, code)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target = node.targets[0]
            named = target.id.lower() if isinstance(target, ast.Name) else ""
            is_default = "model" in named and "default" in named
            if is_default and isinstance(node.value.value, str):
                code.model, code.line = node.value.value, node.lineno
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    code.names = frozenset(names)
    code.is_decoupled = "set_model_transaction_policy" in names
    return code


def _read_call(node: ast.Call, code: _Code) -> None:
    function = node.func
    called = (
        function.attr if isinstance(function, ast.Attribute) else str(getattr(function, "id", ""))
    )
    keywords = {each.arg: each.value for each in node.keywords if each.arg}
    if called in ("from_pretrained", "pipeline", "LLM"):
        first = node.args[0] if node.args and called != "pipeline" else keywords.get("model")
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and not code.model:
            code.model, code.line = first.value, node.lineno
        for key in ("torch_dtype", "dtype"):
            value = keywords.get(key)
            if isinstance(value, ast.Attribute):
                code.dtype, code.dtype_line = value.attr, value.lineno
    if called in ("generate", "pipeline", "__call__"):
        for key in ("do_sample", "temperature", "top_k", "top_p", "num_beams"):
            if key in keywords:
                code.sampling.append((f"{key}={_written(keywords[key])}", node.lineno))


def _written(node: ast.expr) -> str:
    """Return a constant; any other expression is not printed, since it may be of any depth."""
    return repr(node.value)[:40] if isinstance(node, ast.Constant) else "…"


@dataclass(frozen=True)
class Layout:
    """A kind of model that people have written, and how it is adopted."""

    name: str
    fits: Callable[[_Found, Mapping[str, _Found]], bool]
    read: Callable[[_Found, Mapping[str, _Found], Adopted], None]


def _located(found: _Found, text: str, origin: Origin, adopted: Adopted) -> Value:
    where = locate(text, found.text.folder, miss=lambda words: adopted.miss(origin, words))
    return Value(where, origin)


def _add(
    found: _Found,
    adopted: Adopted,
    source: Value,
    plugin: str,
    why: Origin,
    options: Mapping[str, Value] | None = None,
) -> AdoptedModel:
    name = model_name(found.model.name)
    if name != found.model.name:
        adopted.miss(Origin(found.path, 0, ""), f"it is called {name} here")
    model = AdoptedModel(name, source, Value(plugin, why), options=dict(options or {}))
    adopted.models.append(model)
    return model


def _add_placement(found: _Found, model: AdoptedModel, adopted: Adopted) -> None:
    """Take over batching, and on what its instances run."""
    config = found.config
    if config.max_batch_size:
        text = f"max_batch_size: {config.max_batch_size}"
        model.options["max_batch_size"] = Value(
            str(config.max_batch_size), found.origin(text, "max_batch_size")
        )
    delay = config.dynamic_batching.max_queue_delay_microseconds
    if delay:
        text = f"max_queue_delay_microseconds: {delay}"
        model.options["queue_delay_us"] = Value(str(delay), found.origin(text, "max_queue_delay"))
    for group in config.instance_group:
        kind = group.DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number[group.kind].name
        if group.count > 1:
            text = f"count: {group.count}"
            model.options["instances"] = Value(str(group.count), found.origin(text, "count"))
        if kind == "KIND_GPU":
            number = group.gpus[0] if len(group.gpus) == 1 else None
            text = f"kind: {kind}" + ("" if number is None else f", gpus: [ {number} ]")
            device = "cuda" if not number else f"cuda:{number}"
            model.options["device"] = Value(device, found.origin(text, "KIND_GPU"))
        elif kind == "KIND_CPU":
            model.options["device"] = Value("cpu", found.origin(f"kind: {kind}", "KIND_CPU"))
        break
    for path in ("EXECUTION_ENV_PATH",):
        if path in found.parameters:
            adopted.miss(found.origin(path), "its packages are those of llmserve serve here")


def _add_dtype(found: _Found, model: AdoptedModel) -> None:
    code = found.code
    if code.dtype:
        origin = found.code_origin(f"torch_dtype=torch.{code.dtype}", code.dtype_line)
        model.options["dtype"] = Value(code.dtype, origin)


def _fits_pipeline(found: _Found, others: Mapping[str, _Found]) -> bool:
    del others
    texts = {"text_input"} <= found.inputs.keys() <= {"text_input", "max_tokens"}
    is_plain = found.backend == "python" and "text_output" in found.outputs and texts
    return is_plain and not found.config.HasField("sequence_batching") and bool(_model_of(found))


def _model_of(found: _Found) -> str:
    for key in ("huggingface_model", "model_name", "hf_model", "model_id", "model"):
        if value := found.parameters.get(key):
            return value
    return found.code.model


def _source_of(found: _Found, adopted: Adopted) -> Value:
    for key in ("huggingface_model", "model_name", "hf_model", "model_id", "model"):
        if value := found.parameters.get(key):
            return _located(found, value, found.origin(shown(key, value), key), adopted)
    origin = found.code_origin(shown("loads", found.code.model))
    return _located(found, found.code.model, origin, adopted)


def _read_pipeline(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    """Text and ``max_tokens`` in, the prompt with its continuation out."""
    del others
    has_length = "max_tokens" in found.inputs
    layout = "tutorial" if has_length else "tutorial-text"
    tensors = found.origin("the tensors text_input, text_output", "text_input")
    model = _add(found, adopted, _source_of(found, adopted), "hf", tensors,
                 {"layout": Value(layout, tensors)})  # fmt: skip
    _add_placement(found, model, adopted)
    if "max_batch_size" not in model.options:
        model.options["max_batch_size"] = Value("0", found.origin("no max_batch_size"))
    kind = found.inputs.get("max_tokens", "TYPE_UINT32")
    if kind != "TYPE_UINT32":
        adopted.miss(
            found.origin(f"max_tokens {kind}", "max_tokens"), "the layout has it as TYPE_UINT32"
        )
    _add_dtype(found, model)
    length = found.parameters.get("max_output_length")
    if not has_length and length and length.isdecimal():
        origin = found.origin(shown("max_output_length", length), "max_output_length")
        model.options["max_tokens"] = Value(length, origin)
        adopted.miss(origin, "its length counts the prompt, and max_tokens only the answer")
    for text, line in found.code.sampling:
        adopted.miss(
            found.code_origin(text, line), "a field of each request: here decoding is greedy"
        )


def _fits_iterative(found: _Found, others: Mapping[str, _Found]) -> bool:
    del others
    is_python = found.backend == "python" and bool(_model_of(found))
    return is_python and found.config.sequence_batching.iterative_sequence


def _read_iterative(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    """One token in each pass, with requests that come and go between passes."""
    del others
    why = found.origin("iterative_sequence: true", "iterative_sequence")
    model = _add(found, adopted, _source_of(found, adopted), "iterative", why,
                 {"layout": Value("tutorial", why)})  # fmt: skip
    _add_placement(found, model, adopted)
    _add_dtype(found, model)
    model.options.pop("max_batch_size", None)


def _fits_static(found: _Found, others: Mapping[str, _Found]) -> bool:
    del others
    decoupled = found.config.model_transaction_policy.decoupled or found.code.is_decoupled
    return found.backend == "python" and decoupled and bool(_model_of(found))


def _read_static(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    """A batch is answered, token by token, before the next one begins."""
    del others
    why = found.code_origin("decoupled, without a sequence batcher")
    stream = {"stream": Value("true", why)}
    model = _add(found, adopted, _source_of(found, adopted), "iterative", why, stream)
    model.batching = Value("static", why)
    _add_placement(found, model, adopted)
    model.options.pop("max_batch_size", None)


def _steps(found: _Found, others: Mapping[str, _Found]) -> list[_Found]:
    names = [step.model_name for step in found.config.ensemble_scheduling.step]
    return [others[name] for name in names if name in others]


def _fits_graphs(found: _Found, others: Mapping[str, _Found]) -> bool:
    steps = _steps(found, others)
    has_sequence = any(each.config.HasField("sequence_batching") for each in (found, *steps))
    return has_sequence and any(each.backend in _GRAPHS for each in steps)


def _read_graphs(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    """A tokenizer, an exported graph of GPT-2 and a detokenizer, asked once for each token."""
    steps = _steps(found, others)
    graph = next(each for each in steps if each.backend in _GRAPHS)
    named = next((value for each in (*steps, found) if (value := _model_of(each))), "")
    why = graph.origin(f"backend {graph.backend}", graph.backend)
    if named:
        holder = next(each for each in (*steps, found) if _model_of(each))
        source = _source_of(holder, adopted)
    else:
        source = Value("gpt2", why)
        adopted.miss(why, "the graph does not say what it was exported from: gpt2, or --model")
    model = _add(found, adopted, source, _GRAPHS[graph.backend], why,
                 {"layout": Value("tutorial", why)})  # fmt: skip
    batcher = next(each for each in (found, *steps) if each.config.HasField("sequence_batching"))
    is_oldest = batcher.config.sequence_batching.WhichOneof("strategy_choice") == "oldest"
    strategy = "oldest" if is_oldest else "direct"
    model.batching = Value(f"sequence-{strategy}", batcher.origin(strategy))
    asked = [name for name, kind in found.inputs.items() if kind in _TEXTS]
    if asked and "INPUT_TOKENS" not in asked:
        adopted.miss(found.origin(asked[0]), "the layout calls it INPUT_TOKENS")


def _fits_trtllm(found: _Found, others: Mapping[str, _Found]) -> bool:
    return any(each.backend == "tensorrtllm" for each in _steps(found, others))


def _read_trtllm(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    """TensorRT-LLM's ensemble: the engine, and models that tokenize and detokenize."""
    steps = _steps(found, others)
    engine = next(each for each in steps if each.backend == "tensorrtllm")
    holder = next((each for each in steps if each.parameters.get("tokenizer_dir")), None)
    why = engine.origin("backend tensorrtllm", "tensorrtllm")
    if holder is None:
        source = Value("", why)
        adopted.miss(why, "no step names its tokenizer_dir: name the checkpoint with --model")
    else:
        place = holder.parameters["tokenizer_dir"]
        source = _located(
            holder, place, holder.origin(shown("tokenizer_dir", place), "tokenizer_dir"), adopted
        )
    model = _add(found, adopted, source, "trtllm", why)
    for key, text in engine.parameters.items():
        origin = engine.origin(shown(key, text), f'"{key}"')
        if not text or _PLACEHOLDER.search(text):
            continue
        if key in ("gpt_model_type", "batching_strategy"):
            static = text.upper() == "V1"
            model.batching = Value("static" if static else "inflight", origin)
        elif key in _TRTLLM_ALIASES:
            value = text.lower() if key == "decoupled_mode" else text
            model.options[_TRTLLM_ALIASES[key]] = Value(value, origin)
        elif not key.startswith("llmserve."):
            model.options[key] = Value(text, origin)
    if (engine_at := model.options.get("engine_at")) is not None:
        model.options["engine"] = engine_at
    text = f"max_batch_size: {engine.config.max_batch_size}"
    model.options["max_batch_size"] = Value(
        str(engine.config.max_batch_size), engine.origin(text, "max_batch_size")
    )
    adopted.miss(why, "trtllm_version and container are those that the engine was built with: "
                 "set them if they are not the newest")  # fmt: skip


def _fits_vllm(found: _Found, others: Mapping[str, _Found]) -> bool:
    del others
    return found.backend == "vllm"


def _read_vllm(found: _Found, others: Mapping[str, _Found], adopted: Adopted) -> None:
    """vLLM's own backend: ``model.json`` has the arguments of its engine."""
    del others
    path = found.model.folder / "1" / "model.json"
    where = f"{found.path}/1/model.json"
    if not is_inside(path, found.model.folder):
        adopted.miss(Origin(where, 0, ""), "it is a link out of the repository")
        return
    try:
        source = read_source(path, where)
        content = read_json(source)
    except ConfigError as error:
        adopted.miss(Origin(where, 0, ""), error.problem)
        return
    if not isinstance(content, dict) or not isinstance(content.get("model"), str):
        adopted.miss(Origin(where, 0, ""), "it names no model")
        return
    vllm = engine_named("vLLM")
    words = [Word("vllm", 1), Word("serve", 1)]
    for key, value in list(content.items())[:200]:
        flag, line = f"--{key.replace('_', '-')}", source.line_of(f'"{key}"')
        row = vllm.row(flag)
        if row is not None and not row.takes:
            words += [Word(flag, line)] if value is True else []
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(Word(f"{flag}={text}", line))
    named = Value(found.model.name, Origin(found.path, 0, "the name of its folder"))
    adopt_launch(
        Launch(source, words, has_program=True, name=named, is_open=False), adopted
    )  # fmt: skip
    # Its ports are Triton's, which stay.
    adopted.gateway.pop("port", None)
    for name in ("sampling_parameters", "exclude_input_in_output"):
        adopted.miss(Origin(found.path, 0, f"the input {name}"),
                     "each option of a request is a parameter or an input of its own")  # fmt: skip


LAYOUTS: tuple[Layout, ...] = (
    Layout("vLLM's backend", _fits_vllm, _read_vllm),
    Layout("TensorRT-LLM's ensemble", _fits_trtllm, _read_trtllm),
    Layout("a graph behind a sequence batcher", _fits_graphs, _read_graphs),
    Layout("iterative scheduling in Python", _fits_iterative, _read_iterative),
    Layout("a pipeline of transformers in Python", _fits_pipeline, _read_pipeline),
    Layout("batches in Python, token by token", _fits_static, _read_static),
)
