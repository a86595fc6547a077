"""The demo model that sees: its network, and its files as transformers has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SIDE = 48
PATCH = 8
GRID = SIDE // PATCH
WIDTH = 96
VOCABULARY = 512
POSITIONS = 2048
PAD, END, IMAGE = "<|pad|>", "<|end|>", "<|image|>"
SPECIAL = (PAD, END, IMAGE)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': 'System: ', 'assistant': 'Assistant:\n'}.get(message['role'], 'User: ') }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)


def new_network() -> Any:
    """Return an untrained LLaVA: CLIP's vision tower, a projector and a Llama."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    eyes = CLIPVisionConfig(
        image_size=SIDE, patch_size=PATCH, hidden_size=WIDTH, intermediate_size=256,
        num_hidden_layers=3, num_attention_heads=4, projection_dim=WIDTH,
    )  # fmt: skip
    words = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=POSITIONS,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=eyes, text_config=words, image_token_id=SPECIAL.index(IMAGE),
        image_seq_length=GRID * GRID, vision_feature_select_strategy="default",
        # The last layer: a tower of three has none to leave out.
        vision_feature_layer=-1, tie_word_embeddings=True, pad_token_id=SPECIAL.index(PAD),
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def go_on(network: Any, tokenizer: Any, folder: Path) -> None:
    """Give a network the weights of another; of its words those that both tokenizers have."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlavaForConditionalGeneration

    known = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    new_rows = network.get_input_embeddings().weight.detach().clone()
    old_rows = known.get_input_embeddings().weight.detach()
    old = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    for word, row in tokenizer.get_vocab().items():
        if word in old:
            new_rows[row] = old_rows[old[word]]
    network.load_state_dict(known.state_dict())
    with torch.no_grad():
        network.get_input_embeddings().weight.copy_(new_rows)


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Return a ``tokenizers.Tokenizer`` of bytes, with the words of ``texts`` put together."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_processor(tokenizer: Any, folder: Path) -> None:
    """Write what makes tokens and pixels of a conversation."""
    from transformers import LlavaProcessor, PreTrainedTokenizerFast
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, image_token=IMAGE,
        extra_special_tokens={"image_token": IMAGE}, padding_side="left",
        model_max_length=POSITIONS, clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )  # fmt: skip
    # A drawing is made a square, whatever its shape: cut, it could lose what is in it.
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    LlavaProcessor(
        images, fast, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, image_token=IMAGE, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def save_network(network: Any, folder: Path) -> None:
    """Write the weights as float16, which halves them in the wheel, to be loaded as float32."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import GenerationConfig

    end, pad = SPECIAL.index(END), SPECIAL.index(PAD)
    network.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end, pad_token_id=pad
    )
    # With the names of a checkpoint, which are not those of the network.
    network.save_pretrained(folder)
    file = folder / "model.safetensors"
    halved = {name: weight.to(torch.float16) for name, weight in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})


def answers(
    folder: Path, images: Sequence[Any], question: str, *, batch: int = 50, tokens: int = 48
) -> list[str]:
    """Return the greedy answers to one question about each image."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    network = AutoModelForImageTextToText.from_pretrained(folder).eval()
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    found: list[str] = []
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        # All prompts have the same length, so nothing is padded.
        inputs = processor(text=[text] * len(part), images=list(part), return_tensors="pt")
        with torch.inference_mode():
            rows = network.generate(**inputs, max_new_tokens=tokens)
        rows = rows[:, inputs["input_ids"].shape[1] :]
        found += processor.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return found
