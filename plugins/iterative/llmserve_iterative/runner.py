"""Runs the model in the fastest way that reproduces its own results."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from llmserve.plugin import IncompatibleError
from llmserve.runtime import Chunk, ImageTower, LoraProducts, speed_up
from llmserve_iterative.attention import FlashPlan, PagePlan, Rule, Store, Tokens
from llmserve_iterative.delta_rule import modules_with_steps, stepping_in_place
from llmserve_iterative.graphs import DecodeGraphs

LOG = logging.getLogger(__name__)
ATTENTION = "llmserve_pages"

Update = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class TorchLogits:
    """Rows of logits on the model's device."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def likeliest(self) -> list[int]:
        if self._rows.device.type == "cpu":
            # Several times faster than PyTorch's.
            tokens: list[int] = self._rows.float().numpy().argmax(axis=-1).tolist()
        else:
            tokens = self._rows.argmax(dim=-1).tolist()
        return tokens

    def row(self, index: int) -> npt.NDArray[Any]:
        row: npt.NDArray[Any] = self._rows[index].float().cpu().numpy()
        return row


class PassCache(Cache):  # type: ignore[misc]
    """Acts as the model's cache, but passes each layer's keys and values to a function."""

    is_compileable = False
    is_initialized = True

    def __init__(self, update: Update, model: Any, *, past: int = 0, width: int = 0) -> None:
        super().__init__(layers=[])
        self._count: int = model.config.get_text_config().num_hidden_layers
        self._update, self._past, self._width = update, past, width

    def __len__(self) -> int:
        return self._count

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self._update(layer, keys, values)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self._past

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self._width, 0

    @property
    def is_sliding(self) -> list[bool]:
        # No layer drops old tokens: windows are left to the mask.
        return [False] * self._count

    is_linear = is_dummy = is_sliding


class StateKey(NamedTuple):
    """Which of a sequence's states it is, in which layer; most kinds have one of each."""

    kind: str
    layer: int
    place: int


States = dict[StateKey, Tensor]
"""The states of one or several sequences, of which the first dimension has a row for each."""


class StatePart(NamedTuple):
    """What one of a sequence's states is like."""

    key: StateKey
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateCache(PassCache):
    """A cache that has states beside keys and values, and puts new ones in their place."""

    def __init__(self, update: Update, model: Any, states: States, **sizes: int) -> None:
        super().__init__(update, model, **sizes)
        self._states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._states.get(StateKey("convolution", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._states.get(StateKey("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append to what the convolution sees; return all of it, and keep its newest columns."""
        key = StateKey("convolution", layer_idx, state_idx)
        old = self._states.get(key)
        width = conv_kernel_size or (conv_states if old is None else old).shape[-1]
        if old is not None:
            full = torch.cat([old, conv_states], dim=-1)
        else:
            full = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._states[key] = full[..., -width:].clone()
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        key = StateKey("recurrent", layer_idx, state_idx)
        old = self._states.get(key)
        new = recurrent_states if old is None else recurrent_states.to(old.dtype)
        self._states[key] = new
        return new

    def has_previous_state(self, layer_idx: int | None = None, *_: Any, **__: Any) -> bool:
        return any(layer_idx in (None, key.layer) for key in self._states)

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False


class Inputs:
    """What a model calls its inputs, and which of them it takes."""

    def __init__(self, model: Any) -> None:
        taken = inspect.signature(model.forward).parameters
        self.cache = next((name for name in _CACHES if name in taken), "")
        self.positions = "position_ids" in taken
        self.rows = "logits_to_keep" in taken
        if not self.cache:
            raise NotImplementedError("it has no cache")


class StoredPages:
    """The pages of a runner that keeps a :class:`Store`: it is an
    :class:`~llmserve.runtime.PageRunner`."""

    page_size: int
    _store: Store
    _model: Any

    @property
    def page_form(self) -> str:
        if not (form := self._store.form):
            return ""
        return f"{self._versions} {form}"

    @property
    def _versions(self) -> str:
        """The versions of libraries, and how they compute the model."""
        versions = f"torch {torch.__version__} transformers {transformers.__version__}"
        how = f"{type(self).__name__} {type(self._model).__name__} {self._model.dtype}"
        return f"{versions} {how}"

    def read_page(self, page: int) -> bytes:
        return self._store.read(page * self.page_size, (page + 1) * self.page_size)

    def write_page(self, page: int, content: bytes) -> bool:
        return self._store.fill(page * self.page_size, (page + 1) * self.page_size, content)


class FlatRunner(StoredPages):
    """Runs all chunks as one row of tokens, each of which attends to its own sequence.

    Everything in a decoder except attention treats tokens one by one, so nothing needs padding: the
    model's own code runs over the row, with our attention.
    """

    def __init__(
        self,
        plan: type[PagePlan | FlashPlan],
        model: Any,
        tokens: int,
        *,
        graphs: bool = False,
        tower: ImageTower | None = None,
    ) -> None:
        AttentionInterface.register(ATTENTION, _attend)
        # A tower has an attention of its own.
        model.set_attn_implementation({tower.text_part: ATTENTION} if tower else ATTENTION)
        self._tower = tower
        self.page_count, self.page_size = _page_count(tokens, plan.page_size), plan.page_size
        self._plan, self._model = plan, model
        self.adapters = LoraProducts(model)
        # On a CPU, PyTorch's attention is several times slower in half precision than in single.
        dtype = torch.float32 if model.device.type == "cpu" else model.dtype
        # The padding of a recorded pass writes to a separate page.
        self._store = Store((self.page_count + graphs) * self.page_size, dtype)
        self._graphs = DecodeGraphs(self._forward, self.page_count) if graphs else None
        self.windows: set[int] = set()
        """The windows that the model's layers have named."""
        # A recorded pass has one token of each sequence.
        self.accepts_runs = not graphs
        for module in model.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                # There is no padding, and checking for it waits for the device in each pass.
                module.warn_if_padding_and_no_attention_mask = lambda *_: None

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> TorchLogits:
        plan: Any = self._plan_of(chunks)
        keys = [chunk.adapter for chunk in chunks for _ in chunk.ids]
        # A recorded pass adds nothing.
        is_seeing = any(chunk.embedded for chunk in chunks)
        if self._graphs is None or not chunks[-1].single or any(keys) or is_seeing:
            with self.adapters.of_rows(keys, (1, len(keys))):
                return TorchLogits(self._forward(plan, chunks))
        # A recorded pass returns a row for each token, also for those of which none is needed.
        rows = self._graphs.run(plan)
        return TorchLogits(
            rows if len(plan.tokens.needed) == len(rows) else rows[plan.tokens.needed]
        )

    def _plan_of(self, chunks: Sequence[Chunk]) -> PagePlan | FlashPlan:
        """Return the plan of a pass: another one where the usual one cannot see ahead."""
        device = self._model.device
        if not self._plan.sees_ahead and any(chunk.wholes() for chunk in chunks):
            return PagePlan(chunks, device, self.page_size)
        return self._plan(chunks, device)

    def _forward(self, plan: PagePlan | FlashPlan, chunks: Sequence[Chunk] = ()) -> Tensor:
        """Compute a pass; ``chunks`` are those of the plan, if they may have images."""

        def update(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return self._store.write(layer, plan.tokens.rows, keys[0], values[0])

        output = self._model(
            **_read(self._tower, chunks, plan.tokens.ids[None]),
            position_ids=plan.tokens.positions[..., None, :],
            past_key_values=PassCache(update, self._model),
            use_cache=True,
            logits_to_keep=plan.tokens.needed,
            llmserve_plan=plan,
        )
        self.windows |= plan.tokens.windows
        return cast(Tensor, output.logits[0])


def _read(tower: ImageTower | None, chunks: Sequence[Chunk], ids: Tensor) -> dict[str, Tensor]:
    """Return what a pass reads: the ids, or embeddings where they stand for images."""
    return {"input_ids": ids} if tower is None else tower.inputs(chunks, ids)


def _seeing_each_other(model: Any, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """Return what tells a model which tokens see each other, from where the sequence begins.

    Of a chunk of one token, it is the last of them, and sees all.
    """
    if len(chunks) > 1 or chunks[0].single or not (wholes := chunks[0].wholes()):
        return {}
    kinds = torch.zeros(1, chunks[0].stop, dtype=torch.long, device=model.device)
    for part in wholes:
        kinds[0, part.start : part.stop] = 1
    # Gemma 3 calls it otherwise than Gemma 4.
    taken = inspect.signature(model.forward).parameters
    return {"token_type_ids" if "token_type_ids" in taken else "mm_token_type_ids": kinds}


class PaddedRunner(StoredPages):
    """Runs the model's own attention, of any kind, over rows padded to one length.

    Rows are padded on the left, as ``generate`` pads a batch, so that everything that depends on
    distances (windows, biases) is right. The price is a copy of the cache in every step.
    """

    page_size = 32
    accepts_runs = False

    def __init__(self, model: Any, tokens: int, *, tower: ImageTower | None = None) -> None:
        self.page_count = _page_count(tokens, self.page_size)
        self._model, self._tower = model, tower
        self.adapters = LoraProducts(model)
        self._store = Store(self.page_count * self.page_size, model.dtype)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> TorchLogits:
        # A chunk of several tokens runs alone: padding would align it with the others' ends.
        groups = [[chunk] for chunk in chunks if not chunk.single]
        if singles := [chunk for chunk in chunks if chunk.single]:
            groups.insert(0, singles)
        return TorchLogits(torch.cat([self._forward(group) for group in groups]))

    def _forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the rows that are needed; all chunks have one token, or there is only one."""
        device = self._model.device
        tokens = Tokens(chunks, self.page_size, device)
        width = max(chunk.stop for chunk in chunks)
        stops = torch.tensor([chunk.stop for chunk in chunks], device=device)[:, None]
        positions = torch.arange(-width, 0, device=device) + stops
        # Positions before a sequence's beginning are masked, and read the first token's row.
        at = positions.clamp(min=0)
        tables = [torch.tensor(chunk.pages, device=device) for chunk in chunks]
        pages = pad_sequence(tables, batch_first=True).gather(1, at // self.page_size)
        rows = pages * self.page_size + at % self.page_size
        shape = len(chunks), len(tokens.ids) // len(chunks)

        def update(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            new = (part.transpose(0, 1).flatten(1, 2) for part in (keys, values))
            all_keys, all_values = self._store.write(layer, tokens.rows, *new)
            return all_keys[rows].transpose(1, 2), all_values[rows].transpose(1, 2)

        keys = [chunk.adapter for chunk in chunks for _ in chunk.ids]
        with self.adapters.of_rows(keys, shape):
            output = self._call(
                chunks,
                update,
                past=width - shape[1],
                width=width,
                **_read(self._tower, chunks, tokens.ids.view(shape)),
                **_seeing_each_other(self._model, chunks),
                attention_mask=(positions >= 0).long(),
                position_ids=tokens.positions.unflatten(-1, shape),
                logits_to_keep=max(chunk.rows for chunk in chunks) or 1,
            )
        logits = cast(Tensor, output.logits)
        if len(chunks) == 1:
            return logits[0, logits.shape[1] - chunks[0].rows :]
        return logits[[row for row, chunk in enumerate(chunks) if chunk.rows], -1]

    def _call(
        self, chunks: Sequence[Chunk], update: Update, *, past: int, width: int, **inputs: Any
    ) -> Any:
        """Call the model for chunks whose rows are padded to a width."""
        del chunks
        cache = PassCache(update, self._model, past=past, width=width)
        return self._model(past_key_values=cache, use_cache=True, **inputs)


class StatesRunner(PaddedRunner):
    """Runs models with layers that have a state of fixed size, which may have attention as well.

    It is a :class:`~llmserve.runtime.StatePageRunner`. The states of sequences that decode together
    stay together, and are put together again only when others join or leave.
    """

    def __init__(
        self, model: Any, tokens: int, *, copies_bytes: int = 0, pieces: bool = True
    ) -> None:
        super().__init__(model, tokens)
        self._inputs, self._pieces = Inputs(model), pieces
        self._steps = modules_with_steps(model)
        self._copies_bytes = copies_bytes if pieces else 0
        self._states: dict[int, States] = {}
        self._parts: list[StatePart] = []
        """What a state consists of, which is known after a pass."""
        self._together: tuple[list[int], States] = [], {}
        """The numbers of those that decoded together last, and their states."""
        self.most_copies = 0
        """As many as fit, which is known after a pass. Where the rest of a prompt is read token by
        token, none: pieces that end where copies are kept would take longer than copies save."""

    @property
    def page_form(self) -> str:
        parts = self._parts
        if not parts or any(part.device.type != "cpu" for part in parts):
            return ""
        # Of a model without attention, pages hold nothing.
        if not (form := self._store.form) and not self._store.is_empty:
            return ""
        shapes = [(*part.key, str(part.dtype), part.shape) for part in parts]
        return f"{self._versions} {form} states {shapes}"

    def read_state(self, state: int) -> bytes:
        states = self._of(state)
        if _parts(states) != self._parts:
            return b""
        return b"".join(
            states[part.key].contiguous().view(torch.uint8).numpy().tobytes()
            for part in self._parts
        )

    def write_state(self, state: int, content: bytes) -> bool:
        if len(content) != sum(part.nbytes for part in self._parts):
            return False
        self.forget(state)
        states, at = self._states.setdefault(state, {}), 0
        for part in self._parts:
            # A pass may change tensors in place, and bytes cannot be changed.
            piece = torch.frombuffer(bytearray(content[at : at + part.nbytes]), dtype=part.dtype)
            states[part.key] = piece.view(part.shape)
            at += part.nbytes
        return True

    def copy(self, state: int, copy: int) -> None:
        # A pass may change tensors in place.
        self._states[copy] = {key: part.clone() for key, part in self._of(state).items()}

    def _of(self, state: int) -> States:
        numbers, together = self._together
        return _row(together, numbers.index(state)) if state in numbers else self._states[state]

    def forget(self, state: int) -> None:
        self._states.pop(state, None)
        numbers = self._together[0]
        if state in numbers:
            numbers[numbers.index(state)] = _NOBODY

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> TorchLogits:
        # Chunks of one token come first, but one that begins may be among them.
        together = [at for at, chunk in enumerate(chunks) if chunk.single and chunk.start]
        rows: dict[int, Tensor] = {}
        if together:
            counts = [chunks[at].rows for at in together]
            found = self._forward([chunks[at] for at in together])
            rows = dict(zip(together, torch.split(found, counts), strict=True))
        for at, chunk in enumerate(chunks):
            if at not in rows:
                rows[at] = self._read(chunk)
        return TorchLogits(torch.cat([rows[at] for at in range(len(chunks))]))

    def _read(self, chunk: Chunk) -> Tensor:
        """Compute the tokens of one sequence."""
        if not chunk.start:
            self.forget(chunk.state)
        if self._pieces or not chunk.start:
            return self._forward([chunk])
        first = chunk.stop - chunk.rows
        singles = [
            replace(chunk, ids=[token], start=at, rows=int(at >= first))
            for at, token in enumerate(chunk.ids, chunk.start)
        ]
        return torch.cat([self._forward([single]) for single in singles])

    def _call(
        self, chunks: Sequence[Chunk], update: Update, *, past: int, width: int, **inputs: Any
    ) -> Any:
        numbers = [chunk.state for chunk in chunks]
        states = self._gather(numbers)
        cache = StateCache(update, self._model, states, past=past, width=width)
        if not self._inputs.positions:
            del inputs["position_ids"]
        if not self._inputs.rows:
            del inputs["logits_to_keep"]
        # Of a model without attention, one may ask for its whole length.
        if self._store.is_empty or len({chunk.stop for chunk in chunks}) == 1:
            del inputs["attention_mask"]
        with stepping_in_place(self._steps):
            output = self._model(**{self._inputs.cache: cache}, use_cache=True, **inputs)
        if not states or any(len(part) != len(chunks) for part in states.values()):
            raise NotImplementedError("its states are not in its cache, one for each sequence")
        if len(chunks) > 1:
            self._together = numbers, states
        else:
            self._states[numbers[0]] = states
            if not self._parts:
                self._parts = _parts(states)
                size = sum(part.nbytes for part in self._parts)
                self.most_copies = self._copies_bytes // size
        return output

    def _gather(self, numbers: list[int]) -> States:
        """Return the states of these sequences, which are no longer kept anywhere else."""
        before, together = self._together
        if numbers == before:
            return together
        if any(number in before for number in numbers):
            for row, number in enumerate(before):
                if number != _NOBODY:
                    self._states[number] = _row(together, row)
            self._together = [], {}
        each = [self._states.pop(number, {}) for number in numbers]
        if len(each) == 1:
            return each[0]
        return {key: torch.cat([states[key] for states in each]) for key in each[0]}


def _parts(states: States) -> list[StatePart]:
    return [
        StatePart(key, part.dtype, tuple(part.shape), part.device)
        for key, part in sorted(states.items())
    ]


_NOBODY = -1
"""Stands for a sequence that has left those that decode together."""


def _row(states: States, row: int) -> States:
    return {key: part[row : row + 1] for key, part in states.items()}


class OwnCacheRunner:
    """Runs each sequence by itself with the cache that the model makes: for models with states.

    It is a :class:`~llmserve.runtime.StateRunner`. Pages only count the tokens. The weights are
    read once for each sequence, so several take as many times as long as one.
    """

    page_size = 32
    accepts_runs = False
    most_copies = 0

    def __init__(self, model: Any, tokens: int, *, pieces: bool = True) -> None:
        self.page_count = _page_count(tokens, self.page_size)
        self._model = model
        self._pieces = pieces
        """Whether the model computes several tokens at once after others."""
        self.adapters = LoraProducts(model)
        self._inputs = Inputs(model)
        self._caches: dict[int, Any] = {}

    def copy(self, state: int, copy: int) -> None:
        raise NotImplementedError("a cache that the model makes is not copied")

    def forget(self, state: int) -> None:
        self._caches.pop(state, None)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> TorchLogits:
        rows = [self._compute(chunk) for chunk in chunks]
        return TorchLogits(torch.cat(rows))

    def _compute(self, chunk: Chunk) -> Tensor:
        if not chunk.start:
            self.forget(chunk.state)
        count = len(chunk.ids)
        step = count if self._pieces or not chunk.start else 1
        logits = torch.cat([self._forward(chunk, at, at + step) for at in range(0, count, step)])
        return logits[len(logits) - chunk.rows :]

    def _forward(self, chunk: Chunk, first: int, stop: int) -> Tensor:
        """Compute some tokens of a chunk; return the rows of at least those that are needed."""
        start, ids = chunk.start + first, chunk.ids[first:stop]
        state, device = chunk.state, self._model.device
        inputs: dict[str, Any] = {}
        if (cache := self._caches.get(state)) is not None:
            inputs[self._inputs.cache] = cache
        if self._inputs.positions:
            # Not every model asks its cache how many tokens there are.
            inputs["position_ids"] = torch.arange(start, start + len(ids), device=device)[None]
        if self._inputs.rows:
            inputs["logits_to_keep"] = max(1, chunk.rows - (len(chunk.ids) - stop))
        with self.adapters.of_rows([chunk.adapter] * len(ids), (1, len(ids))):
            output = self._model(
                input_ids=torch.tensor([ids], device=device), use_cache=True, **inputs
            )
        if (cache := output.get(self._inputs.cache)) is None:
            raise NotImplementedError("it returns no cache")
        self._caches[state] = cache
        return cast(Tensor, output.logits[0])


# What models call their caches: all of transformers "cache", since 5.24.
_CACHES = ("cache", "past_key_values", "cache_params", "state")

Runner = FlatRunner | PaddedRunner | StatesRunner | OwnCacheRunner


def _page_count(tokens: int, page_size: int) -> int:
    # The trial needs two pages, however small the cache.
    return max(2, -(-tokens // page_size))


def make_runner(
    model: Any, cache_tokens: int, copies_bytes: int = 256_000_000, tower: ImageTower | None = None
) -> Runner:
    """Return the first runner that agrees with the model in a short trial.

    Copies of states, if it has any, take up to ``copies_bytes``. ``tower`` is what makes the
    images of a model that reads them into embeddings.
    """
    if tower is not None and _version(transformers.__version__) < _version(
        tower.least_transformers
    ):
        raise IncompatibleError(
            f"images are read with {type(model).__name__} by transformers "
            f"{tower.least_transformers} or later; this is {transformers.__version__}",
            hint="install it, or build the model for text alone with --set max_images=0",
        )
    trial = Trial(model)
    own_attention = model.config._attn_implementation
    speed_up(model)
    runners: list[Callable[..., Runner]] = []
    if getattr(model, "_supports_attention_backend", False):
        if model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16):
            runners += [
                partial(FlatRunner, FlashPlan, graphs=True, tower=tower),
                partial(FlatRunner, FlashPlan, tower=tower),
            ]
        runners.append(partial(FlatRunner, PagePlan, tower=tower))
    runners.append(partial(PaddedRunner, tower=tower))
    if tower is None:
        runners += [
            partial(StatesRunner, copies_bytes=copies_bytes),
            partial(StatesRunner, pieces=False),
            OwnCacheRunner,
            partial(OwnCacheRunner, pieces=False),
        ]
    for create in runners:
        if runner := trial.run(partial(create, model, cache_tokens)):
            return runner
        model.set_attn_implementation(own_attention)
    raise IncompatibleError(
        f"{type(model).__name__} cannot be decoded token by token with a cache of keys and "
        f"values ({trial.reason})",
        hint="serve it with the plugin hf",
    )


def _version(words: str) -> list[int]:
    return [int(part) for part in words.split(".")[:2]]


class Trial:
    """Two short sequences, with the logits of the unmodified model."""

    def __init__(self, model: Any) -> None:
        self.reason = ""
        self._window = _window(model.config.get_text_config())
        size = model.config.get_text_config().vocab_size
        self._ids = [[(7 * i + 3) % size for i in range(9)], [(5 * i + 1) % size for i in range(6)]]
        with torch.inference_mode():
            rows = [model(torch.tensor([ids], device=model.device)) for ids in self._ids]
        self._expected = [row.logits[0, -1].float().cpu().numpy() for row in rows]
        tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
        self._tolerance = tolerance * max(1.0, *(abs(row).max() for row in self._expected))

    def run(self, create: Callable[[], Runner]) -> Runner | None:
        """Return the runner if it can be created and agrees; otherwise log why not."""
        try:
            runner = create()
            # Both in the same passes: pieces, then a token and a piece, then tokens.
            first, second = self._ids
            runner.run([Chunk(first[:4], 0, [0], 0), Chunk(second[:4], 0, [1], 0, state=1)])
            runner.run([Chunk(second[4:5], 4, [1], 0, state=1), Chunk(first[4:8], 4, [0], 2)])
            logits = runner.run([Chunk(first[8:], 8, [0]), Chunk(second[5:], 5, [1], state=1)])
            difference = max(
                float(np.abs(logits.row(row) - expected).max())
                for row, expected in enumerate(self._expected)
            )
            # It is longer than the trial, which cannot see it.
            if self._window and isinstance(runner, FlatRunner) and not runner.windows:
                raise NotImplementedError("a window that only the mask has")
            if isinstance(runner, StatesRunner | OwnCacheRunner):
                # The engine gives the same numbers.
                runner.forget(0)
                runner.forget(1)
            if difference <= self._tolerance:
                return runner
            self.reason = f"its logits are off by {difference:.2g}"
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
        LOG.info("a runner does not suit this model: %s", self.reason)
        return None


def _window(config: Any) -> int | None:
    """Return how far back a model's layers look, if that is less than its context."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if not window or (kinds and "sliding_attention" not in kinds):
        return None
    length = getattr(config, "max_position_embeddings", None) or window + 1
    return int(window) if window < length else None


def _attend(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    llmserve_plan: PagePlan | FlashPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    unsupported = (others.get(name) for name in ("s_aux", "position_bias"))
    if attention_mask is not None or any(argument is not None for argument in unsupported):
        raise NotImplementedError("attention with sinks, biases or a custom mask")
    if sliding_window:
        llmserve_plan.tokens.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale, sliding_window, softcap, _part_length(_module))
    output = llmserve_plan.attend(query[0], key, value, rule)
    return output[None].to(query.dtype), None


def _part_length(module: Any) -> int | None:
    """Return of how many tokens a part is that a layer attends to; None if it attends to all."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if config is None or layer is None or not kinds or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)
