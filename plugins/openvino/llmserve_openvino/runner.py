"""A converted model with paged attention: the runner of the plugin."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from llmserve.graphs import openvino as ov
from llmserve.plugin import IncompatibleError
from llmserve.runtime import ArrayLogits, Chunk, Lora, LoraError, memory
from llmserve_openvino.capped_attention import apply_caps, check_cache
from llmserve_openvino.compiled import THREADS, Compiled
from llmserve_openvino.embedded_rows import Embeds, row_inputs, take_rows
from llmserve_openvino.exact import PAGES, check_graph, check_runner
from llmserve_openvino.lora import OpenVinoProducts, add_products, product_shapes
from llmserve_openvino.mapping import release
from llmserve_openvino.own_attention import apply_told
from llmserve_openvino.passes import NEEDED, PAGE_SIZE, Pass
from llmserve_openvino.state_tables import StateTables, has_states, zeros
from llmserve_openvino.threads import ThreadChoice
from llmserve_openvino.workarounds import keep_halves, read_model, use_paged_attention

LOG = logging.getLogger(__name__)
_PACKED = 1.5
"""What packed weights take at most, relative to their file."""
# What may follow the product that gives the scores, and leaves each row to itself.
_BY_ROW = {"Add", "Convert", "Divide", "Multiply", "Tanh"}


class OpenVinoRunner:
    """Implements :class:`llmserve.runtime.Runner`.

    ``cache_bytes`` is what the cache may take in all, 0 for as much as ``cache_tokens`` need: the
    operating system gives memory to a page when it is first written. Copies of states, if it has
    any, take up to ``copies_bytes``. The model is ready for the
    adapters in ``expected``; for others it may have to be compiled again. ``file`` is where the
    model has been read from, if it has. If it is ``exact``, the scores of a sequence are the same
    whatever else is in its passes (:mod:`llmserve_openvino.exact`). ``embeds`` makes what some
    tokens stand for, of a model that reads images.
    """

    page_size = PAGE_SIZE
    accepts_runs = True

    def __init__(
        self,
        graph: Any,
        properties: Mapping[str, Any],
        *,
        file: Path | None = None,
        cache_tokens: int,
        cache_bytes: int = 0,
        sequences: int = 1,
        copies_bytes: int = 0,
        expected: Iterable[Lora] = (),
        exact: bool = False,
        embeds: Embeds | None = None,
    ) -> None:
        self._embeds = embeds
        self._core = ov.Core()
        self._file = file
        # Another build may take its place meanwhile.
        self._packed_bytes = _PACKED * file.with_suffix(".bin").stat().st_size if file else 0
        self._options = {"PERFORMANCE_HINT": "LATENCY", **properties}
        self._half = properties.get("INFERENCE_PRECISION_HINT") == "bf16"
        # The file may be another model's by the time that this one is compiled again: it stays
        # mapped as it was read.
        self._graph = graph
        check_cache(graph, str(properties.get("KV_CACHE_PRECISION", "")))
        self.adapters = OpenVinoProducts(product_shapes(self._graph), half=self._half, exact=exact)
        for lora in expected:
            with suppress(LoraError):
                self.adapters.fits(lora)
                self.adapters.expect(lora)
        self._compiled: Compiled | None = self._compile(self._options)
        model = self._compiled.model
        layers = sum(port.any_name.startswith("key_cache.") for port in model.inputs)
        ports = [
            model.input(f"{kind}_cache.{layer}")
            for layer in range(layers)
            for kind in ("key", "value")
        ]
        shapes = [[axis.get_length() for axis in port.partial_shape[1:]] for port in ports]
        self._part_bytes = [
            int(np.prod(shape)) * port.element_type.size
            for shape, port in zip(shapes, ports, strict=True)
        ]
        page_bytes = sum(self._part_bytes)
        limit = cache_bytes or int(memory().free // 2)
        pages = -(-cache_tokens // PAGE_SIZE)
        if page_bytes:
            pages = limit // page_bytes if cache_bytes else min(pages, limit // page_bytes)
        # An answer needs two pages, however small the cache.
        self.page_count = max(PAGES if exact else 2, pages)
        self._spare = self.page_count if exact else None
        held = self.page_count + exact
        # The tensors refer to the memory and do not own it.
        self._memory = [zeros(held * size) for size in self._part_bytes]
        self._cache = {
            port.any_name: ov.Tensor(memory, ov.Shape([held, *shape]), port.element_type)
            for memory, shape, port in zip(self._memory, shapes, ports, strict=True)
        }
        self._states = StateTables(model, sequences, copies_bytes)
        self._cache |= self._states.tensors
        self._compiled.attach(self._cache)
        # What an exact model computes depends on the number of threads. One that is in no file is
        # only compared with another, in a build whose memory is planned.
        stays = exact or file is None or self._options.get(THREADS)
        cores = len(os.sched_getaffinity(0))
        self._choice = None if stays else ThreadChoice(self._compiled.threads, cores)
        self._is_short = False
        """Whether it was told that there is no memory for another number of threads."""
        self._exact_threads = str(self._compiled.threads) if exact else ""
        self._coming: Future[Compiled] | None = None
        """The model for another number of threads, as long as it is made."""
        self._pack_weights()
        if exact:
            check_runner(self, model.output("logits").partial_shape[-1].get_length())
            self._clear(*range(PAGES), self.page_count)

    def run(self, chunks: Sequence[Chunk]) -> ArrayLogits:
        compiled = self._ready()
        passed = Pass(chunks, self._spare)
        inputs = {**passed.inputs, **self._states.inputs(chunks)}
        if compiled.widths:
            inputs |= row_inputs(self._embeds, chunks, passed.begins, compiled.widths)
        for name in inputs.keys() & compiled.inputs:
            compiled.give(name, inputs[name])
        if compiled.targets:
            compiled.give_adapters(self.adapters, passed.adapters)
        logits = compiled.infer()
        if not compiled.is_packed:
            compiled.is_packed = True
            self._release()
        return ArrayLogits(logits.reshape(-1, logits.shape[-1])[: passed.rows])

    @property
    def page_form(self) -> str:
        """What the bytes of a page mean; with it, it is a :class:`llmserve.runtime.PageRunner`."""
        parts = [
            (name, str(tensor.element_type), list(tensor.shape)[1:])
            for name, tensor in list(self._cache.items())[: len(self._memory)]
        ]
        options = {**self._options, THREADS: self._exact_threads}
        exact = "" if self._spare is None else " exact"
        states = f" states {self._states.form}" if self._states.tensors else ""
        images = f" images {self._embeds.form}" if self._embeds else ""
        form = (
            f"openvino {ov.get_version()} {sorted(options.items())} {parts}{exact}{states}{images}"
        )
        return form if parts or states else ""

    def read_page(self, page: int) -> bytes:
        return b"".join(part.tobytes() for part in self._parts(page))

    def write_page(self, page: int, content: bytes) -> bool:
        parts = self._parts(page)
        if len(content) != sum(map(len, parts)):
            return False
        at = 0
        for part in parts:
            part[:] = np.frombuffer(content, np.uint8, len(part), at)
            at += len(part)
        return True

    def _parts(self, page: int) -> list[Any]:
        """Return what a page holds in the keys and values of each layer."""
        return [
            memory[page * size : (page + 1) * size]
            for memory, size in zip(self._memory, self._part_bytes, strict=True)
        ]

    def _compile(self, options: Mapping[str, Any]) -> Compiled:
        """Compile the model that was read, with a place for what adapters add to its products."""
        graph = self._graph.clone()
        paged(graph)
        keep_halves(graph)
        if self._embeds:
            take_rows(graph)
        _keep_needed_rows(graph)
        targets = self.adapters.targets
        if targets:
            add_products(graph, sorted(targets), half=self._half)
        return Compiled(self._core.compile_model(graph, "CPU", options), targets)

    def _ready(self) -> Compiled:
        """Return what computes the next pass. The cache stays whatever changes."""
        if self._coming is not None and self._coming.done():
            self._change(self._coming)
            self._coming = None
        if self._compiled is None or self.adapters.targets != self._compiled.targets:
            # An adapter adds to products to which none did before. The former model goes first:
            # both may not fit in memory.
            self._compiled = None
            self._compiled = self._compile(self._options)
            self._compiled.attach(self._cache)
        elif self._choice and self._coming is None:
            self._follow(self._choice.wanted())
        return self._compiled

    def _follow(self, threads: int) -> None:
        """Make the model for another number of threads beside passes, where both fit in memory."""
        if self._choice is None or threads == self._choice.threads:
            return
        if self._packed_bytes > memory().free:
            if not self._is_short:
                self._is_short = True
                LOG.warning(
                    "llmserve: note: by what other programs use of the cores, %d threads would "
                    "compute faster here (--threads), and there is no memory to change that now.",
                    threads,
                )
            return
        options = {**self._options, THREADS: threads}
        chunk = Chunk([0], 0, [0])
        inputs = {**Pass([chunk]).inputs, **self._states.first(chunk)}
        coming: Future[Compiled] = Future()
        self._coming = coming

        def make() -> None:
            try:
                compiled = self._compile(options)
                compiled.pack(inputs, self._cache)
                coming.set_result(compiled)
            except Exception as error:
                coming.set_exception(error)

        # A process that ends waits for it: OpenVINO cannot be left in the middle.
        try:
            Thread(target=make, name="llmserve-threads").start()
        except RuntimeError as error:
            # The system has no more of them to give.
            coming.set_exception(error)

    def _change(self, coming: Future[Compiled]) -> None:
        """Compute with another number of threads from now on."""
        if error := coming.exception():
            LOG.warning("llmserve: note: the number of threads stays: %s", error)
            self._choice = None
            return
        compiled = coming.result()
        LOG.info("llmserve: %d threads compute now", compiled.threads)
        compiled.attach(self._cache)
        self._compiled = compiled
        self._options[THREADS] = compiled.threads
        if self._choice:
            self._choice.threads = compiled.threads
        self._release()

    def _release(self) -> None:
        """Give the file's memory back: once the weights are packed, only the table of tokens is
        read from it, row by row."""
        if self._file:
            release(self._file.with_suffix(".bin"))

    def _pack_weights(self) -> None:
        """Run a first pass, and leave no trace of it."""
        if self._file:
            self.run([Chunk([0], 0, [0])])
            self._states.forget(0)
            self._clear(0)

    def _clear(self, *pages: int) -> None:
        for page in pages:
            for part in self._parts(page):
                part[:] = 0


class OpenVinoStateRunner(OpenVinoRunner):
    """Implements :class:`llmserve.runtime.StatePageRunner`, for a model that keeps states."""

    # Nor guesses: no state goes back.
    accepts_runs = False

    @property
    def most_copies(self) -> int:
        return self._states.most_copies

    def copy(self, state: int, copy: int) -> None:
        self._states.copy(state, copy)

    def forget(self, state: int) -> None:
        self._states.forget(state)

    def read_state(self, state: int) -> bytes:
        return self._states.read(state)

    def write_state(self, state: int, content: bytes) -> bool:
        return self._states.write(state, content)


def make_runner(model: Path | Any, properties: Mapping[str, Any], **sizes: Any) -> OpenVinoRunner:
    """Return the runner of a model, or of the one in a file, with what :class:`OpenVinoRunner`
    is told."""
    file = model if isinstance(model, Path) else None
    graph = read_model(str(file)) if file else model
    if sizes.get("exact"):
        check_graph(graph)
    kind = OpenVinoStateRunner if has_states(graph) else OpenVinoRunner
    return kind(graph, properties, file=file, **sizes)


def paged(model: Any) -> Any:
    """Return a model whose attention reads pages; refuse one in which OpenVINO finds none."""
    if has_states(model) and not any(map(_is_attention, model.get_ops())):
        return flat(model)
    try:
        use_paged_attention(model)
        apply_told(model)
        apply_caps(model, PAGE_SIZE)
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise IncompatibleError(
            f"OpenVINO cannot read this model's cache in pages ({last_line})",
            hint="serve it with the plugin hf",
        ) from None
    return model


def flat(model: Any) -> Any:
    """Return a model without attention, whose tokens are in a flat row."""
    axis = ov.opset13.constant(np.int64(1))
    for name in ("input_ids", "position_ids"):
        port = model.input(name)
        readers = port.get_target_inputs()
        port.get_node().set_partial_shape(ov.PartialShape([-1]))
        column = ov.opset13.unsqueeze(port.get_node(), axis).output(0)
        for reader in readers:
            reader.replace_source_output(column)
    for name in ("attention_mask", "beam_idx"):
        model.remove_parameter(model.input(name).get_node())
    model.validate_nodes_and_infer_types()
    return model


def _is_attention(operation: Any) -> bool:
    return bool(operation.get_type_name() == "ScaledDotProductAttention")


def _keep_needed_rows(model: Any) -> None:
    """Compute scores only of the rows that an additional input names.

    They are selected before the last product, which is a large part of a pass with a prompt.
    """
    ops = ov.opset13
    rows = ops.parameter([-1], ov.Type.i64, name=NEEDED)
    rows.output(0).get_tensor().set_names({NEEDED})
    consumer = model.output("logits").get_node().input(0)
    node = consumer.get_source_output().get_node()
    while node.get_type_name() in _BY_ROW:
        varying = [port for port in node.inputs() if port.get_partial_shape().is_dynamic]
        if len(varying) != 1:
            break
        consumer, node = varying[0], varying[0].get_source_output().get_node()
    if node.get_type_name() == "MatMul":
        consumer = node.input(0)
    source = consumer.get_source_output()
    selected = ops.gather(source, rows, ops.constant(np.int64(0)))
    consumer.replace_source_output(selected.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()
