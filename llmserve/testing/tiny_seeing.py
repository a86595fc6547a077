"""Tiny random models that read images, with their processors, as transformers saves them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmserve.runtime import Embedded, Generation, embedded_parts
from llmserve.runtime.torch.processor import load_processor
from llmserve.runtime.torch.seeing_kinds import image_loader
from llmserve.runtime.torch.workarounds import mend
from llmserve.testing.fake import generation

CONTEXT = 512
LENGTH = 10
"""Of the answers to what is asked here."""
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
_QWEN_MARKS = {
    "image_token": IMAGE_MARK, "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
}  # fmt: skip
_GEMMA4_MARKS = {
    "image_token": IMAGE_MARK, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "audio_token": "<|audio|>", "boa_token": "<start_of_sound>", "eoa_token": "<end_of_sound>",
    # The processor itself adds it, where a tokenizer has none.
    "video_token": "<|video|>",
}  # fmt: skip
_PHI4_MARKS = {"image_token": IMAGE_MARK, "audio_token": "<|audio|>"}
# Other families have these among the special tokens that all have.
_MARKS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "boi_token": IMAGE_MARK, "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>",
    },
    "gemma4": _GEMMA4_MARKS,
    "gemma4_moe": _GEMMA4_MARKS,
    "qwen2_vl": _QWEN_MARKS,
    "qwen2_5_vl": _QWEN_MARKS,
    "qwen3_vl": _QWEN_MARKS,
    "phi4_multimodal": _PHI4_MARKS,
}  # fmt: skip
_SIZES = ((24, 16), (16, 40), (33, 33), (20, 9))
_VISION = {**_LAYERS, "image_size": 16, "patch_size": 4}
_SHARED = (
    *_LAYERS, "num_key_value_heads", "vocab_size", "max_position_embeddings", "pad_token_id",
    "bos_token_id", "eos_token_id",
)  # fmt: skip
"""What the models for texts of all families are told."""


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


def save_seeing(family: str, folder: Path, **layers: Any) -> Path:
    """Save a model of a family and its processor, with layers of other sizes if they are given."""
    tokenizer = _tokenizer(_MARKS.get(family, {}))
    vocabulary = len(tokenizer)
    sizes = {**_LAYERS, **layers}
    text = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=CONTEXT,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config, processor = _SAVED[family](text, {**_VISION, **layers}, tokenizer)
    torch.manual_seed(5)
    loader = getattr(transformers, image_loader(config.model_type))
    model = loader.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # Some towers begin so wide that all images are much the same to the text.
                parameter.mul_(6 if parameter.std() < 0.5 else 0.12)
                # What leads from images to texts begins with nothing in some, and where patches are
                # with the same everywhere.
                if parameter.min() == parameter.max():
                    parameter.normal_()
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(marks: Mapping[str, str]) -> Any:
    """Return a tokenizer of letters, and of the marks of images and those around them.

    It has no parts of letters: an answer is the same text however it is decoded.
    """
    around = (marks.get(name, "") for name in ("vision_bos_token", "vision_eos_token"))
    shown = IMAGE_MARK.join(around)
    letters = sorted(x for x in pre_tokenizers.ByteLevel.alphabet() if x.isascii() or x in "ĠĊ")
    tokens = dict.fromkeys((*_SPECIAL, *letters, *marks.values()))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(_SPECIAL[3:]),
        chat_template=_TEMPLATE.replace(IMAGE_MARK, shown),
        **({"extra_special_tokens": dict(marks)} if marks else {}),
    )  # fmt: skip


def _llava(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    vision = transformers.CLIPVisionConfig(**layers, projection_dim=32)
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


def _idefics3(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    config = transformers.Idefics3Config(
        vision_config={**layers}, text_config=text, image_token_id=_SPECIAL.index(IMAGE_MARK),
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


def _llava_next(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    vision = transformers.CLIPVisionConfig(**layers, projection_dim=32)
    pinpoints = [[16, 32], [32, 16]]
    config = transformers.LlavaNextConfig(
        vision_config=vision, text_config=text, image_token_id=_SPECIAL.index(IMAGE_MARK),
        image_seq_length=16, image_grid_pinpoints=pinpoints,
    )  # fmt: skip
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=pinpoints,
    )  # fmt: skip
    processor = transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=_TEMPLATE,
    )  # fmt: skip
    return config, processor


def _gemma3(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """Return a model whose window is shorter than an image, of which each has 25 tokens."""
    kinds = ["sliding_attention", "full_attention"]
    image, start, end = (
        tokenizer.convert_tokens_to_ids(_MARKS["gemma3"][name])
        for name in ("image_token", "boi_token", "eoi_token")
    )
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **{name: getattr(text, name) for name in _SHARED},
            head_dim=text.hidden_size // text.num_attention_heads, query_pre_attn_scalar=1,
            layer_types=(kinds * layers["num_hidden_layers"])[: layers["num_hidden_layers"]],
            sliding_window=9,
        ),
        vision_config=transformers.SiglipVisionConfig(**{**layers, "image_size": 20}),
        mm_tokens_per_image=25, tie_word_embeddings=False,
        image_token_index=image, boi_token_index=start, eoi_token_index=end,
    )  # fmt: skip
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    images = Gemma3ImageProcessorPil(size={"height": 20, "width": 20})
    processor = transformers.Gemma3Processor(
        images, tokenizer, image_seq_length=25, chat_template=_TEMPLATE
    )
    return config, processor


def _gemma4(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """Return a model as the small released ones: each layer has embeddings of its own, the last
    ones use the keys of others, and it hears too."""
    own = {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": text.vocab_size, "use_double_wide_mlp": True,
    }  # fmt: skip
    sound = transformers.Gemma4AudioConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        subsampling_conv_channels=[4, 4], output_proj_dims=16,
    )  # fmt: skip
    return _of_gemma4(text, own, layers, tokenizer, audio_config=sound)


def _gemma4_moe(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """Return a model as the large released ones: the tokens of an image see each other in layers
    with a window, and keys are values elsewhere. It has experts as well."""
    own = {
        "use_bidirectional_attention": "vision", "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    }  # fmt: skip
    return _of_gemma4(text, own, {**layers, "standardize": True}, tokenizer)


def _of_gemma4(
    text: Any, own: Mapping[str, Any], layers: Mapping[str, Any], tokenizer: Any, **others: Any
) -> tuple[Any, Any]:
    """Return a model whose window is shorter than an image, of which each has up to 70 tokens, the
    fewest that the processor knows."""
    sizes = {**{name: getattr(text, name) for name in _SHARED}, **own}
    # The last two may use the keys of others, of which there is one of either kind.
    sizes["num_hidden_layers"] *= 2
    head = text.hidden_size // text.num_attention_heads
    patches = {"patch_size": 4, "pooling_kernel_size": 2}
    layers = {name: each for name, each in layers.items() if name != "image_size"}
    ids = {
        f"{name}_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in _GEMMA4_MARKS.items()
    }
    # Only this one has another name.
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    config = transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(
            **sizes, head_dim=head, global_head_dim=2 * head, sliding_window=9,
            layer_types=["sliding_attention", "full_attention"] * text.num_hidden_layers,
        ),
        vision_config=transformers.Gemma4VisionConfig(**{
            **layers, **patches, "num_key_value_heads": layers["num_attention_heads"],
            "head_dim": layers["hidden_size"] // layers["num_attention_heads"],
            "position_embedding_size": 140,
        }),
        **ids, **others,
    )  # fmt: skip
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    images = Gemma4ImageProcessorPil(**patches, max_soft_tokens=70)
    return config, _WholeProcessor("Gemma4Processor", images, tokenizer)


@dataclass
class _WholeProcessor:
    """A processor that is saved as Gemma 4 is released: all its parts are in one file."""

    kind: str
    images: Any
    tokenizer: Any

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        sounds = transformers.Gemma4AudioFeatureExtractor()
        content = {
            "processor_class": self.kind, "feature_extractor": json.loads(sounds.to_json_string()),
            "image_processor": json.loads(self.images.to_json_string()),
            "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
        }  # fmt: skip
        (folder / "processor_config.json").write_text(json.dumps(content), encoding="utf-8")


@dataclass
class _HubProcessor:
    """A processor whose parts are saved as hubs have them: one that reads videos too cannot be made
    without torchvision."""

    kind: str
    images: Any
    tokenizer: Any

    def save_pretrained(self, folder: Path) -> None:
        self.images.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**content, "processor_class": self.kind}), encoding="utf-8")


def _grids(
    name: str, text: Any, tokenizer: Any, vision: Mapping[str, Any], *, looks_back: int | None = 24
) -> tuple[Any, Any]:
    """Return a model of Qwen's, of which an image has as many tokens as its size asks for.

    The last layer looks back over a part of most prompts alone.
    """
    image, video, start, stop = tokenizer.convert_tokens_to_ids([*_QWEN_MARKS.values()])
    head = text.hidden_size // text.num_attention_heads
    third, rest = divmod(head // 2, 3)
    axes = [third + rest, third, third]
    layers = {each: getattr(text, each) for each in _SHARED}
    config = getattr(transformers, f"{name}Config")(
        text_config={
            **layers, "head_dim": head,
            # Each place of a few dozen is told well from the next.
            "rope_parameters": {"rope_type": "default", "rope_theta": 4.0, "mrope_section": axes},
            **({
                "use_sliding_window": True, "sliding_window": looks_back,
                "max_window_layers": text.num_hidden_layers - 1,
            } if looks_back else {}),
        },
        vision_config={"patch_size": 4, "depth": 2, "num_heads": 4, **vision},
        image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=stop,
    )  # fmt: skip
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 12 * 8 * 8, "longest_edge": 30 * 8 * 8}
    )
    return config, _HubProcessor(f"{name}Processor", images, tokenizer)


def _qwen2_vl(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    vision = {"embed_dim": layers["hidden_size"], "hidden_size": text.hidden_size, "mlp_ratio": 2}
    return _grids("Qwen2VL", text, tokenizer, vision)


def _qwen2_5_vl(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    sizes = {name: layers[name] for name in ("hidden_size", "intermediate_size")}
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    vision = {**sizes, **windows, "out_hidden_size": text.hidden_size}
    return _grids("Qwen2_5_VL", text, tokenizer, vision)


def _qwen3_vl(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    sizes = {name: layers[name] for name in ("hidden_size", "intermediate_size")}
    # Its first layer gets rows of the tower's first one as well.
    own = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    vision = {**sizes, **own, "out_hidden_size": text.hidden_size}
    return _grids("Qwen3VL", text, tokenizer, vision, looks_back=None)


def _phi4(text: Any, layers: Mapping[str, Any], tokenizer: Any) -> tuple[Any, Any]:
    """Return a model that sees an overview and up to six crops of an image, and hears too."""
    image, sound = tokenizer.convert_tokens_to_ids([*_PHI4_MARKS.values()])
    heard = {
        "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
        "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 4,
    }  # fmt: skip
    side = layers["image_size"]
    config = transformers.Phi4MultimodalConfig(
        **{name: getattr(text, name) for name in _SHARED},
        vision_config={**layers, "crop_size": side, "image_token_id": image},
        audio_config={**heard, "audio_token_id": sound},
    )
    images = {
        "image_processor_type": "Phi4MultimodalImageProcessor", "dynamic_hd": 6,
        "size": {"height": side, "width": side}, "patch_size": layers["patch_size"],
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "resample": 3,
        "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
    }  # fmt: skip
    return config, _HubProcessor("Phi4MultimodalProcessor", _Written(images), tokenizer)


@dataclass
class _Written:
    """A part of a processor that cannot be made here, as its file has it."""

    content: Mapping[str, Any]

    def save_pretrained(self, folder: Path) -> None:
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(self.content), encoding="utf-8")


_Made = Callable[[Any, Mapping[str, Any], Any], tuple[Any, Any]]
AS_TEXTS: Mapping[str, _Made] = {"llava": _llava, "idefics3": _idefics3}
"""Those that attend to an image as to a text."""
IN_GRIDS: Mapping[str, _Made] = {
    "qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl,
}  # fmt: skip
"""Those whose tokens of an image have several positions each."""
FAMILIES: Mapping[str, _Made] = {
    **AS_TEXTS, "gemma3": _gemma3, "gemma4": _gemma4, "gemma4_moe": _gemma4_moe, **IN_GRIDS,
    "phi4_multimodal": _phi4,
}  # fmt: skip
_SAVED: Mapping[str, _Made] = {**FAMILIES, "llava_next": _llava_next}


def conversations(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Return requests for answers about so many images each."""
    asked: list[dict[str, Any]] = []
    for number, count in enumerate(counts):
        parts = [{"type": "text", "text": f"Look at {number}"}, *[{"type": "image"}] * count]
        images = [data_url(picture(10 * number + each)) for each in range(count)]
        asked.append({
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 8,
            "ignore_eos": True,
            **({"image_url": images} if images else {}),
        })  # fmt: skip
    return asked


@dataclass
class SeenQuestion:
    """A question about images, and what the model's own ``generate()`` answers."""

    ids: list[int]
    tensors: dict[str, Any]
    """Of the images, as the processor makes them."""
    expected: list[int]
    parts: tuple[Embedded, ...] = ()

    def begin(self, **params: Any) -> Generation:
        return generation(self.ids, LENGTH, images=self.parts, **params)


@dataclass
class Seeing:
    """A model that sees, as it was saved."""

    folder: Path

    def load(self) -> Any:
        kind = transformers.AutoConfig.from_pretrained(self.folder).model_type
        model = getattr(transformers, image_loader(kind)).from_pretrained(self.folder).eval()
        mend(model)
        # Without an end token.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return model

    @cached_property
    def model(self) -> Any:
        return self.load()

    @cached_property
    def processor(self) -> Any:
        return load_processor(str(self.folder))

    def ask(self, *images: int, question: str = "what?") -> SeenQuestion:
        """Ask about pictures of these seeds, of several sizes."""
        shown = "".join(f" {number}:<image>" for number, _ in enumerate(images))
        pictures = [picture(seed, *_SIZES[at % 4]) for at, seed in enumerate(images)]
        more = {"images": [pictures]} if images else {}
        text = f"look{shown} {question}"
        inputs = self.processor(text=[text], **more, return_tensors="pt", add_special_tokens=False)
        ids = inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            found = self.model.generate(**inputs, do_sample=False, max_new_tokens=LENGTH)
        tensors = {n: t for n, t in inputs.items() if n not in ("input_ids", "attention_mask")}
        parts = embedded_parts(self.model.config, ids, tensors) if images else ()
        return SeenQuestion(ids, tensors, found[0, len(ids) :].tolist(), parts)
