"""A checkpoint run by transformers in this process, as the model to compare with.

No code of the checkpoint is ever run.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmserve.errors import ModelSourceError
from llmserve.plugin import install_command, open_checkpoint
from llmserve.runtime import LoraError, read_lora, read_lora_weights
from llmserve_certify.reference import Noise

_REMEMBERED = 512
_TAIL = 16
"""How many tokens of a prompt decide how its answer's first token is written."""
_COMPARED = 10
_GROUP = 32


@contextmanager
def opened(model: str, report: Callable[[str], None]) -> Iterator[Checkpoint]:
    """Load what ``--against`` names: a folder, an id on the hub, a GGUF file or ``demo``."""
    with open_checkpoint(model, report) as source:
        report(f"loading {model} to compare with")
        yield Checkpoint(model, source.folder, source.described())


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from showing its own progress, in the middle of ours."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


class Checkpoint:
    """A causal language model in float32 on this machine's processor."""

    def __init__(self, name: str, folder: Path, described: Mapping[str, str]) -> None:
        try:
            import torch
            import transformers
        except ImportError:
            hint = install_command("llmserve-certify[against]")
            raise ModelSourceError("--against needs torch and transformers", hint=hint) from None
        self._torch = torch
        self.name, self._described = name, dict(described)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            with without_bars():
                self._model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, trust_remote_code=False
                ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            words = " ".join(str(error).split())[:200]
            raise ModelSourceError(f"{name} cannot be loaded: {words}") from None
        self.precision = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        text_config = config.get_text_config()
        self.context: int | None = getattr(text_config, "max_position_embeddings", None)
        plain, whole = self.encode("a", special=False), self.encode("a")
        begins = len(whole) > len(plain) and whole[0] == self._tokenizer.bos_token_id
        self.begin: int | None = whole[0] if begins else None
        self.ends = frozenset(self._end_ids())
        self.special_texts = tuple(
            text for text in self._tokenizer.all_special_tokens if len(text) > 2
        )
        self.chats = bool(self._tokenizer.chat_template)
        self._versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._past: Any = None
        self._past_ids: list[int] = []
        self._scores: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def merge_adapter(self, name: str, folder: Path) -> None:
        """Add what an adapter adds to the model's own weights."""
        try:
            lora = read_lora(folder)
            for path, first, second in read_lora_weights(lora):
                module = self._model.get_submodule(path)
                added = self._torch.from_numpy(second.T @ first)
                is_turned = not isinstance(module, self._torch.nn.Linear)
                with self._torch.no_grad():
                    module.weight.add_(added.T if is_turned else added)
        except (LoraError, AttributeError, RuntimeError) as error:
            words = " ".join(str(error).split())[:200]
            hint = "name the adapter's folder, and the model that it is for with --against"
            raise ModelSourceError(f"the adapter {name} {words}", hint=hint) from None
        self.name = f"{self.name} with {name}"
        self._described["adapter"] = name

    def _end_ids(self) -> Iterator[int]:
        for ids in (
            getattr(self._model.generation_config, "eos_token_id", None),
            self._tokenizer.eos_token_id,
        ):
            yield from [ids] if isinstance(ids, int) else ids or ()

    def describe(self) -> dict[str, str]:
        count = sum(parameter.numel() for parameter in self._model.parameters())
        architecture = type(self._model).__name__
        return {
            **self._described,
            "architecture": architecture,
            "parameters": f"{count / 1e6:.1f} M",
            "stored as": self.precision,
            **self._versions,
        }

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        tail = list(prompt)[-_TAIL:]
        return self._text([*tail, *answer])[len(self._text(tail)) :]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=opened,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(str(error)) from None
        return text

    def scores(self, ids: Sequence[int]) -> Any:
        key = tuple(ids)
        if key in self._scores:
            self._scores.move_to_end(key)
            return self._scores[key]
        known = self._past_ids
        start = (
            len(known) if known and len(key) > len(known) and [*key[: len(known)]] == known else 0
        )
        with self._torch.inference_mode():
            result = self._model(
                input_ids=self._torch.tensor([key[start:]]),
                past_key_values=self._past if start else None,
                use_cache=True,
            )
        self._past = getattr(result, "past_key_values", None)
        self._past_ids = [*key] if self._past is not None else []
        scores = result.logits[0, -1].float().numpy()
        self._scores[key] = scores
        if len(self._scores) > _REMEMBERED:
            self._scores.popitem(last=False)
        return scores

    def _all(self, model: Any, ids: Sequence[int]) -> Any:
        with self._torch.inference_mode():
            logits = model(input_ids=self._torch.tensor([list(ids)]), use_cache=False).logits
        return logits[0].float().numpy()

    def noise(self, precision: str, sequences: Sequence[Sequence[int]]) -> Noise:
        import numpy as np

        other = rounded(self._model, precision)
        gap = logprob = 0.0
        positions = 0
        for ids in sequences:
            exact, rough = self._all(self._model, ids), self._all(other, ids)
            top = np.argsort(-exact, axis=1)[:, :_COMPARED]
            moved = np.take_along_axis(rough - exact, top, axis=1)
            gap = max(gap, float(np.abs(moved - moved[:, :1]).max()))
            levels = _levels(rough) - _levels(exact)
            logprob = max(logprob, float(np.abs(moved[:, 0] - levels).max()))
            positions += len(ids)
        return Noise(gap, logprob, positions)


def _levels(scores: Any) -> Any:
    import numpy as np

    top = scores.max(axis=1)
    return top + np.log(np.exp(scores - top[:, None]).sum(axis=1))


def rounded(model: Any, precision: str) -> Any:
    """Return a copy of a model that computes as a server of this precision may."""
    import torch

    other = copy.deepcopy(model)
    if precision in ("bfloat16", "float16"):
        return other.to(getattr(torch, precision))
    if precision in ("int8", "int4"):
        for module in other.modules():
            if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
                module.weight.data = _quantized(module.weight.data, precision)
        return other.to(torch.bfloat16)
    # The order of additions is what two programs of the same precision differ by.
    return other.to(torch.float64)


def _quantized(weight: Any, precision: str) -> Any:
    """Round weights to the levels of 8 or 4 bits: a scale per row, or per 32 weights of one."""
    group = weight.shape[-1] if precision == "int8" or weight.shape[-1] % _GROUP else _GROUP
    rows = weight.reshape(-1, group)
    most = 127 if precision == "int8" else 7
    scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most
    return ((rows / scale).round().clamp(-most - 1, most) * scale).reshape(weight.shape)
