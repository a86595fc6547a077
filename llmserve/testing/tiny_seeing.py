"""Tiny random models that read images, with their processors, as transformers saves them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 512
IMAGE_MARK = "<image>"
_SPECIAL = (
    "<pad>", "<s>", "</s>", IMAGE_MARK, "<fake_token_around_image>", "<end_of_utterance>",
    "<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)  # fmt: skip
# As those of many models that see, it leaves out a content that is a text.
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_LAYERS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_VISION = {**_LAYERS, "image_size": 16, "patch_size": 4}


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """Return a picture of random colours; the same seed gives the same one."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.frombytes("RGB", (width, height), numbers.numpy().tobytes())


def data_url(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Return a picture as requests have it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def save_seeing(family: str, folder: Path) -> Path:
    """Save a model of a family and its processor."""
    tokenizer = _tokenizer()
    vocabulary = len(tokenizer)
    text = transformers.LlamaConfig(
        **_LAYERS, num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=CONTEXT,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config, processor = FAMILIES[family](text, tokenizer)
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Return a tokenizer of letters, and of the marks around images.

    It has no parts of letters: an answer is the same text however it is decoded.
    """
    letters = sorted(x for x in pre_tokenizers.ByteLevel.alphabet() if x.isascii() or x in "ĠĊ")
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *letters))}
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(_SPECIAL[3:]), chat_template=_TEMPLATE,
    )  # fmt: skip


def _llava(text: Any, tokenizer: Any) -> tuple[Any, Any]:
    vision = transformers.CLIPVisionConfig(**_VISION, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=_SPECIAL.index(IMAGE_MARK),
        image_seq_length=16,
    )  # fmt: skip
    size = {"height": 16, "width": 16}
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=_TEMPLATE,
    )  # fmt: skip
    return config, processor


def _idefics3(text: Any, tokenizer: Any) -> tuple[Any, Any]:
    config = transformers.Idefics3Config(
        vision_config=_VISION, text_config=text, image_token_id=_SPECIAL.index(IMAGE_MARK),
        scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=_TEMPLATE
    )
    return config, processor


FAMILIES: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "llava": _llava,
    "idefics3": _idefics3,
}
