"""What a model of embeddings, scores or labels itself computes: the other side of a comparison.

It is computed by transformers, one text at a time, with what the model's own files say of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmserve.errors import ModelSourceError
from llmserve.plugin import encoder_layout, install_command, is_sigmoid, open_checkpoint
from llmserve.runtime.contract import EMBED, RERANK
from llmserve_certify.checkpoint import rounded, without_bars

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmserve.plugin import ModelSource

    Vector = NDArray[np.float32]

QUERY = "How do I cancel a subscription?"
"""What texts are scored by, of a model that ranks them."""
POOLINGS = ("mean", "cls", "last", "max")


class Encoder(Protocol):
    """A model that this machine can run, which makes a vector of each text."""

    name: str
    precision: str
    limit: int
    """The most tokens of a text."""

    def describe(self) -> dict[str, str]: ...

    def values(self, texts: Sequence[str]) -> list[Vector]: ...

    def mistakes(self, text: str) -> Iterator[tuple[str, Vector]]:
        """Yield what usual mistakes make of a text, with the words for them."""
        ...

    def noise(self, precision: str, texts: Sequence[str]) -> float:
        """Return the largest change by rounding to a precision, as a share of a vector's length."""
        ...


class EncoderCheckpoint:
    """Embeddings, scores or labels by transformers in float32 on this machine's processor.

    Scores are of the texts as answers to one query.
    """

    def __init__(self, name: str, source: ModelSource, task: str) -> None:
        try:
            import torch
            import transformers
        except ImportError:
            hint = install_command("llmserve-certify[against]")
            raise ModelSourceError("--against needs torch and transformers", hint=hint) from None
        self._torch, self.name, self._task = torch, name, task
        self._scores_by_sigmoid = task == RERANK and is_sigmoid(source, name)
        self._described = dict(source.described())
        self._layout = encoder_layout(source)
        auto = transformers.AutoModel
        if task != EMBED:
            auto = transformers.AutoModelForSequenceClassification
        try:
            self._config = transformers.AutoConfig.from_pretrained(
                source.folder, trust_remote_code=False
            )
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder)
            with without_bars():
                self._model = auto.from_pretrained(
                    source.folder, dtype=torch.float32, trust_remote_code=False
                ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            words = " ".join(str(error).split())[:200]
            raise ModelSourceError(f"{name} cannot be loaded: {words}") from None
        dtype = getattr(self._config, "dtype", None)
        self.precision = str(dtype or "float32").removeprefix("torch.")
        self.limit: int = self._layout.max_length or 512
        self._versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def describe(self) -> dict[str, str]:
        made = {"made by": "sigmoid" if self._is_sigmoid else "softmax"}
        if self._task == EMBED:
            length = "1" if self._layout.normalize else "any"
            made = {"pooling": self._layout.pooling, "length": length}
        return {
            **self._described,
            "architecture": type(self._model).__name__,
            **made,
            **self._versions,
        }

    @property
    def _is_sigmoid(self) -> bool:
        config = self._config
        if self._task == RERANK:
            return self._scores_by_sigmoid
        several = config.problem_type == "multi_label_classification"
        return bool(several or config.num_labels == 1)

    def values(self, texts: Sequence[str]) -> list[Vector]:
        return [self._value(self._model, text) for text in texts]

    def mistakes(self, text: str) -> Iterator[tuple[str, Vector]]:
        if self._task == EMBED:
            yield from self._wrong_vectors(text)
        else:
            other = "softmax" if self._is_sigmoid else "a sigmoid"
            yield f"{other} makes it of the logits", self._value(self._model, text, changed=True)
        yield (
            "it is computed without the tokens that begin and end a text",
            self._value(self._model, text, special=False),
        )

    def _wrong_vectors(self, text: str) -> Iterator[tuple[str, Vector]]:
        right, is_unit = self._layout.pooling, self._layout.normalize
        for pooling in (right, *(name for name in POOLINGS if name != right)):
            for normalize in (is_unit, not is_unit):
                words = [] if pooling == right else [f"pooled by {pooling} instead of {right}"]
                if normalize != is_unit:
                    words.append("of length 1" if normalize else "not of length 1")
                if words:
                    vector = self._vector(self._model, text, pooling, normalize)
                    yield f"it is {' and '.join(words)}", vector

    def noise(self, precision: str, texts: Sequence[str]) -> float:
        other = rounded(self._model, precision)
        pairs = ((self._value(self._model, t), self._value(other, t)) for t in texts)
        return max(distance(exact, rough) for exact, rough in pairs)

    def _value(
        self, model: Any, text: str, *, special: bool = True, changed: bool = False
    ) -> Vector:
        if self._task == EMBED:
            layout = self._layout
            return self._vector(model, text, layout.pooling, layout.normalize, special=special)
        return self._scores(model, text, special=special, changed=changed)

    def _vector(
        self, model: Any, text: str, pooling: str, normalize: bool, *, special: bool = True
    ) -> Vector:
        import numpy as np

        layout = self._layout
        prompt = layout.prompts.get(layout.default_prompt or "", "")
        states = self._run(model, (prompt + text,), special).last_hidden_state[0]
        vector: Vector = _pooled(states.float(), pooling).numpy()
        return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector

    def _scores(self, model: Any, text: str, *, special: bool, changed: bool) -> Vector:
        texts = (QUERY, text) if self._task == RERANK else (text,)
        logits = self._run(model, texts, special).logits[0].float()
        is_sigmoid = self._is_sigmoid != changed
        if self._task == RERANK and len(logits) == 1:
            scores = self._torch.sigmoid(logits) if is_sigmoid else logits
        elif is_sigmoid and self._task != RERANK:
            scores = self._torch.sigmoid(logits)
        else:
            scores = self._torch.softmax(logits, dim=0)
        if self._task == RERANK:
            best: Vector = scores[-1:].numpy()
            return best
        # In the order of the labels' names, which is that of the server's answer as well.
        names = [str(self._config.id2label[n]) for n in range(len(scores))]
        found: Vector = scores.numpy()[sorted(range(len(names)), key=names.__getitem__)]
        return found

    def _run(self, model: Any, texts: Sequence[str], special: bool) -> Any:
        cased = [text.lower() if self._layout.lowercase else text for text in texts]
        inputs = self._tokenizer(*cased, return_tensors="pt", add_special_tokens=special)
        with self._torch.inference_mode():
            return model(**inputs)


def distance(one: Vector, other: Vector) -> float:
    """Return the length of the difference, as a share of the length of the first."""
    import numpy as np

    if one.shape != other.shape:
        return float("inf")
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(one)), 1e-9))


def _pooled(states: Any, pooling: str) -> Any:
    if pooling == "mean":
        return states.mean(dim=0)
    if pooling == "max":
        return states.max(dim=0).values
    return states[0] if pooling == "cls" else states[-1]


def opened_encoder(model: str, task: str, report: Callable[[str], None]) -> EncoderCheckpoint:
    """Load what ``--against`` names: a folder or an id on the hub."""
    with open_checkpoint(model, report) as source:
        report(f"loading {model} to compare with")
        return EncoderCheckpoint(model, source, task)
