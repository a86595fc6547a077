"""Traps in models that somebody wrote by hand: their ``model.py`` is parsed, and never run.

Each is a row that looks at the parsed code and the configuration, and says where the trap is.
"""

from __future__ import annotations

import ast
import codecs
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.problems import Problem
from llmserve.repository.config import ModelConfig, backend_of, versions

_MOST_BYTES = 1 << 20
_LENGTHS = frozenset({"max_new_tokens", "max_length"})
_OF_ONE = _LENGTHS | {"temperature", "top_k", "top_p", "repetition_penalty", "min_length"}
_GENERATES = frozenset({"generate", "pipeline", "generator"})


@dataclass(frozen=True)
class _Code:
    """A parsed ``model.py`` and its model's configuration."""

    tree: ast.Module
    config: ModelConfig

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def names(self) -> set[str]:
        return {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in self.nodes
            if isinstance(node, (ast.Attribute, ast.Name))
        }

    @cached_property
    def appended(self) -> set[str]:
        """The names of lists that are added to, request by request."""
        return {
            node.func.value.id
            for node in self.calls
            if isinstance(node.func, ast.Attribute)
            and node.func.attr in ("append", "extend")
            and isinstance(node.func.value, ast.Name)
        }

    @property
    def is_batched(self) -> bool:
        config = self.config
        return bool(config.max_batch_size and config.HasField("dynamic_batching"))


@dataclass(frozen=True)
class _Trap:
    message: str
    hint: str
    find: Callable[[_Code], Iterator[int]]
    """Yields the lines that have it; 0 for the configuration."""


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {each.arg: each.value for each in call.keywords if each.arg}


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _growing_answers(code: _Code) -> Iterator[int]:
    for loop in (node for node in code.nodes if isinstance(node, (ast.For, ast.AsyncFor))):
        inside = list(ast.walk(loop))
        made = {
            target.id
            for node in inside
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        grows = {
            node.func.value.id
            for node in inside
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and isinstance(node.func.value, ast.Name)
        } - made
        for node in inside:
            # What is made of such a list in the loop is as long as the list.
            if isinstance(node, ast.Assign) and _names_in(node.value) & grows:
                grows |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        for node in inside:
            if isinstance(node, ast.Call) and _called(node) == "Tensor" and _names_in(node) & grows:
                yield node.lineno


def _first_for_all(code: _Code) -> Iterator[int]:
    for call in code.calls:
        for name, value in _keywords(call).items():
            if (
                name in _OF_ONE
                and isinstance(value, ast.Subscript)
                and isinstance(value.value, ast.Name)
                and isinstance(value.slice, ast.Constant)
                and value.slice.value == 0
                and value.value.id in code.appended
            ):
                yield value.lineno


def _length_with_prompt(code: _Code) -> Iterator[int]:
    for call in code.calls:
        keywords = _keywords(call)
        if "max_length" in keywords and _called(call) in _GENERATES:
            yield keywords["max_length"].lineno


def _old_cache(code: _Code) -> Iterator[int]:
    for node in code.nodes:
        if isinstance(node, ast.Constant) and node.value == "TRANSFORMERS_CACHE":
            yield node.lineno


def _unknown_errors(code: _Code) -> Iterator[int]:
    for call in code.calls:
        value = _keywords(call).get("errors")
        if _called(call) in ("decode", "encode") and isinstance(value, ast.Constant):
            try:
                codecs.lookup_error(str(value.value))
            except (LookupError, ValueError):
                yield value.lineno


def _all_gpus(code: _Code) -> Iterator[int]:
    kinds = {group.kind for group in code.config.instance_group}
    for call in code.calls:
        value = _keywords(call).get("device_map")
        is_auto = isinstance(value, ast.Constant) and value.value == "auto"
        if is_auto and pb.ModelInstanceGroup.KIND_GPU in kinds:
            yield call.lineno


def _fails_together(code: _Code) -> Iterator[int]:
    if code.is_batched and "TritonError" not in code.names:
        yield from _line_of_execute(code)


def _never_cancelled(code: _Code) -> Iterator[int]:
    sends = "get_response_sender" in code.names
    if sends and "is_cancelled" not in code.names:
        yield from _line_of_execute(code)


def _line_of_execute(code: _Code) -> Iterator[int]:
    for node in code.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "execute":
            yield node.lineno
            return


def _missing_parameters(code: _Code) -> Iterator[int]:
    read = {
        target.id
        for node in code.nodes
        if isinstance(node, ast.Assign)
        and any(
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "parameters"
            for each in ast.walk(node.value)
        )
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in code.nodes:
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and isinstance(node.value, ast.Name)
            and node.value.id in read
        ):
            yield node.lineno


def _absent_inputs(code: _Code) -> Iterator[int]:
    optional = {each.name for each in code.config.input if each.optional}
    for node in code.nodes:
        if not (isinstance(node, ast.Attribute) and node.attr == "as_numpy"):
            continue
        call = node.value
        if isinstance(call, ast.Call) and _called(call) == "get_input_tensor_by_name":
            names = {each.value for each in call.args if isinstance(each, ast.Constant)}
            if names & optional:
                yield call.lineno


def _broken_characters(code: _Code) -> Iterator[int]:
    if code.config.sequence_batching.iterative_sequence:
        for call in code.calls:
            if _called(call) == "decode" and isinstance(call.func, ast.Attribute):
                holder = call.func.value
                if isinstance(holder, ast.Attribute) and holder.attr == "tokenizer":
                    yield call.lineno


def _no_candidates(code: _Code) -> Iterator[int]:
    batching = code.config.sequence_batching
    is_oldest = batching.WhichOneof("strategy_choice") == "oldest"
    if is_oldest and not batching.oldest.max_candidate_sequences:
        yield 0


def _waits_for_slots(code: _Code) -> Iterator[int]:
    batching = code.config.sequence_batching
    direct = batching.direct
    is_direct = batching.WhichOneof("strategy_choice") == "direct"
    if is_direct and direct.minimum_slot_utilization and direct.max_queue_delay_microseconds:
        yield 0


_TRAPS = (
    _Trap(
        "a list that grows with each request is sent whole: a request gets the answers of others",
        "make the tensor of this request's answer alone",
        _growing_answers,
    ),
    _Trap(
        "the first request's value is taken for the whole batch",
        "group requests by it, or ask the model once for each",
        _first_for_all,
    ),
    _Trap(
        "max_length counts the prompt: a long one gets no answer",
        "use max_new_tokens",
        _length_with_prompt,
    ),
    _Trap("TRANSFORMERS_CACHE is not read by transformers 5", "set HF_HOME", _old_cache),
    _Trap(
        "there is no such way to treat errors, and the first bad byte raises LookupError",
        'use errors="replace"',
        _unknown_errors,
    ),
    _Trap(
        'device_map="auto" takes all GPUs, whichever an instance is for',
        "use KIND_MODEL, or place it by model_instance_device_id",
        _all_gpus,
    ),
    _Trap(
        "what one request raises fails all requests of its batch",
        "answer that one with an InferenceResponse that has a TritonError",
        _fails_together,
    ),
    _Trap(
        "an answer goes on after its client has left",
        "ask response_sender.is_cancelled() between tokens",
        _never_cancelled,
    ),
    _Trap(
        "a request without this parameter raises KeyError, for its batch as well",
        "read it with get() and a default",
        _missing_parameters,
    ),
    _Trap(
        "this input is optional, and None has no as_numpy()",
        "look whether the tensor is None",
        _absent_inputs,
    ),
    _Trap(
        "a character of several tokens is sent in broken pieces",
        "decode all tokens so far, and send what is new and whole",
        _broken_characters,
    ),
    _Trap(
        "oldest without max_candidate_sequences means none in older versions of Triton",
        "set max_candidate_sequences",
        _no_candidates,
    ),
    _Trap(
        "a step waits for its delay whenever fewer slots are full",
        "leave out minimum_slot_utilization",
        _waits_for_slots,
    ),
)


def check_handwritten(folder: Path, config: ModelConfig) -> Iterator[Problem]:
    """Look for known traps in a model of the Python backend that others wrote; all are notes."""
    if backend_of(config) != "python":
        return
    for version in versions(folder):
        path = version / (config.default_model_filename or "model.py")
        if (tree := _parsed(path)) is None:
            continue
        code = _Code(tree, config)
        for trap in _TRAPS:
            lines = sorted({*trap.find(code)})
            if lines:
                places = ", ".join(map(str, filter(None, lines[:4])))
                where = f"{version.name}/{path.name}:{places}" if places else "config.pbtxt"
                yield Problem(folder.name, f"{where}: {trap.message}", trap.hint, fatal=False)


def _parsed(path: Path) -> ast.Module | None:
    """Parse a file; what cannot be parsed has no traps that could be found."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError, SystemError):
        return None
