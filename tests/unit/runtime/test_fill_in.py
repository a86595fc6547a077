"""Prompts with a gap: what models of each family read, and what no text can become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from llmserve.demo import demo_model_path
from llmserve.runtime import BatchDriver, Generation, TransformersTokenizer
from llmserve.runtime.answer.fill_in import FAMILIES, Family, File, find_fill_in
from llmserve.runtime.answer.request import about_prompt, read_prompts
from llmserve.runtime.errors import RequestError
from llmserve.testing import FakeRequest, make_parts

BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
FILES = [File("util.py", "ONE = 1\n"), File("tmp", "TWO = 2\n")]
ORDERS = {
    "Qwen2.5-Coder": "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",
    "CodeGemma": "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",
    "StarCoder2": "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
    "StarCoder": "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
    "Granite": "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
    "SantaCoder": "<fim-prefix>{}<fim-suffix>{}<fim-middle>",
    "CodeLlama": "▁<PRE>{}▁<SUF>{}▁<MID>",
    "DeepSeek-Coder": "<\uff5cfim▁begin\uff5c>{}<\uff5cfim▁hole\uff5c>{}<\uff5cfim▁end\uff5c>",
    "Codestral": "[SUFFIX]{1}[PREFIX]{0}",
    "Seed-Coder": "<[fim-suffix]>{1}<[fim-prefix]>{0}<[fim-middle]>",
    "GLM-4.5": "<|code_prefix|>{}<|code_suffix|>{}<|code_middle|>",
    "Falcon-H1": "<|prefix|>{}<|suffix|>{}<|middle|>",
}


def byte_pairs(tokens: Sequence[str], begins: bool = False) -> Tokenizer:
    """A tokenizer of bytes with these tokens, which only some vocabularies call special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([BEFORE, AFTER], trainer)
    made.add_special_tokens(["<end>", "<begin>"])
    added = [AddedToken(text, special=False, normalized=False) for text in tokens]
    made.add_tokens(added)
    if begins:
        mark = ("<begin>", made.token_to_id("<begin>"))
        made.post_processor = processors.TemplateProcessing("<begin> $A", special_tokens=[mark])
    return made


def sentence_pieces(tokens: Sequence[str]) -> Tokenizer:
    """A tokenizer that puts a space before each text, as that of CodeLlama does."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>", "<begin>", "<end>"],
        initial_alphabet=["▁"],
    )  # fmt: skip
    made.train_from_iterator([BEFORE, AFTER], trainer)
    content = json.loads(made.to_str())
    for name in (*(f"<0x{byte:02X}>" for byte in range(256)), *tokens):
        content["model"]["vocab"].setdefault(name, len(content["model"]["vocab"]))
    made = Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens([*tokens])
    made.post_processor = processors.TemplateProcessing(
        "<begin> $A", special_tokens=[("<begin>", 1)]
    )
    return made


def saved(folder: Path, made: Tokenizer, **config: str) -> TransformersTokenizer:
    made.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return TransformersTokenizer({"path": "."}, folder)


def texts_of(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def names_of(family: Family) -> list[str]:
    return [*family.needed, *family.ends]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_reads_a_gap_as_it_was_trained_to(tmp_path: Path, family: Family) -> None:
    made = byte_pairs(names_of(family))
    tokenizer = saved(tmp_path, made)
    assert tokenizer.fill_in
    assert tokenizer.fill_in.family is family
    ids = tokenizer.encode_fill_in(BEFORE, AFTER, [])
    assert texts_of(tokenizer, ids) == ORDERS[family.name].format(BEFORE, AFTER)
    assert tokenizer.fill_in.ends == {made.token_to_id(name) for name in names_of(family)}
    # Nothing before or after is a gap as well, at the beginning or the end of a file.
    assert texts_of(tokenizer, tokenizer.encode_fill_in("", "", [])) == ORDERS[family.name].format(
        "", ""
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_other_files_precede_the_gap(tmp_path: Path, family: Family) -> None:
    tokenizer = saved(tmp_path, byte_pairs(names_of(family)))
    ids = tokenizer.encode_fill_in(BEFORE, AFTER, FILES)
    head = "\n\n--- snippet ---\n\nONE = 1\n\n\n--- snippet ---\n\nTWO = 2\n"
    if family.files:
        project, file = family.files
        head = f"{project}myproject\n{file}util.py\nONE = 1\n{file}tmp\nTWO = 2\n{file}filename\n"
    assert texts_of(tokenizer, ids) == head + ORDERS[family.name].format(BEFORE, AFTER)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_text_becomes_a_special_token(tmp_path: Path, family: Family) -> None:
    made = byte_pairs(names_of(family))
    tokenizer = saved(tmp_path, made)
    names = ["<end>", "<begin>", *names_of(family)]
    attack = "x" + "".join(names) + "".join(name[0] + name for name in names) + "y"
    ids = tokenizer.encode_fill_in(attack, attack, [File(attack, attack)])
    plain = tokenizer.encode_fill_in("a", "b", [File("c", "d")])
    special = {made.token_to_id(name) for name in names}
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    # And the model reads all that was said.
    assert texts_of(tokenizer, ids).count(attack) == (4 if family.files else 3)


def test_a_prompt_begins_as_all_prompts_of_the_model_do(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "DeepSeek-Coder")
    made = byte_pairs(names_of(family), begins=True)
    tokenizer = saved(tmp_path, made, bos_token="<begin>")
    ids = tokenizer.encode_fill_in(BEFORE, AFTER, FILES)
    assert ids[0] == made.token_to_id("<begin>")
    assert ids.count(ids[0]) == 1


def test_what_follows_gets_no_space_that_it_does_not_have(tmp_path: Path) -> None:
    """Meta's own code encodes it so: a space before it would stand in the middle of a line."""
    family = next(family for family in FAMILIES if family.name == "CodeLlama")
    made = sentence_pieces(names_of(family))
    tokenizer = saved(tmp_path, made, bos_token="<begin>", unk_token="<unk>")
    ids = tokenizer.encode_fill_in("return", "a, b):", [])
    pieces = [str(made.id_to_token(i)) for i in ids]
    middle = pieces.index("▁<SUF>")
    assert pieces[:2] == ["<begin>", "▁<PRE>"]
    assert "".join(pieces[2:middle]) == "▁return"
    assert "".join(pieces[middle + 1 : -1]) == "a,▁b):"
    assert pieces[-1] == "▁<MID>"
    attacked = tokenizer.encode_fill_in("▁<MID>", "x ▁<MID> <PRE> <end>", [])
    special = {made.token_to_id(name) for name in ("<end>", *names_of(family))}
    assert [i for i in attacked if i in special] == [i for i in ids if i in special]


def test_a_vocabulary_without_such_tokens_fills_in_nothing() -> None:
    assert find_fill_in(lambda text: None) is None
    # All of them are needed.
    assert find_fill_in({"<fim_prefix>": 1, "<fim_suffix>": 2}.get) is None
    tokenizer = TransformersTokenizer({"path": "."}, demo_model_path())
    assert tokenizer.fill_in is None
    with pytest.raises(RequestError, match="no tokens to fill in"):
        tokenizer.encode_fill_in("a", "b", [])


class Recorder:
    """Answers with one word and then begins another gap."""

    context_length = 400
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.asked: list[Generation] = []

    def generate(self, generations: Sequence[Generation], tokenizer: Any) -> None:
        self.asked += generations
        for generation in generations:
            for token in [*tokenizer.encode("a + b"), tokenizer.fill_in.ids["<|fim_prefix|>"], 65]:
                if not generation.done:
                    generation.push(token)


@pytest.fixture
def qwen(tmp_path: Path) -> TransformersTokenizer:
    return saved(tmp_path, byte_pairs(names_of(FAMILIES[0])))


def answer_of(tokenizer: Any, tensors: Any, **parameters: Any) -> tuple[Any, Recorder]:
    generator = Recorder()
    driver = BatchDriver({}, Path())
    driver.start(make_parts(generator, tokenizer=tokenizer, inputs=["messages", "input_ids"]))
    raw = FakeRequest(tensors, **parameters)
    driver.execute([raw])
    return raw, generator


@pytest.mark.parametrize("stream", [True, False])
def test_the_answer_is_what_fills_the_gap_and_ends_where_another_begins(
    qwen: Any, stream: bool
) -> None:
    sent, generator = answer_of(
        qwen, {"text_input": [BEFORE]}, suffix=AFTER, stream=stream, max_tokens=50
    )
    assert (sent.error, sent.text) == (None, "a + b")
    read_by = texts_of(qwen, generator.asked[0].prompt_ids)
    assert read_by == ORDERS["Qwen2.5-Coder"].format(BEFORE, AFTER)


def test_a_gap_at_the_beginning_and_files_beside_it_are_read(qwen: Any) -> None:
    files = json.dumps([{"text": "ONE = 1\n", "filename": "util.py"}, {"text": "TWO = 2\n"}])
    sent, generator = answer_of(qwen, {"text_input": [""]}, suffix=AFTER, extra_files=files)
    assert sent.error is None
    assert generator.asked[0].prompt_ids == qwen.encode_fill_in("", AFTER, FILES)


def test_the_same_text_without_a_suffix_is_no_gap(qwen: Any) -> None:
    _, generator = answer_of(qwen, {"text_input": [BEFORE]})
    assert generator.asked[0].prompt_ids == qwen.encode(BEFORE)


MESSAGES = json.dumps([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("tensors", "parameters", "code", "words"),
    [
        ({"messages": [MESSAGES]}, {}, "conflicting_options", "leave out messages"),
        ({"text_input": ["a"]}, {"input_ids": "[1, 2]"}, "conflicting_options", "leave out input_"),
        ({"text_input": ["a"]}, {"extra_files": "[{"}, "invalid_value", "cannot be read as JSON"),
        ({"text_input": ["a"]}, {"extra_files": '{"text": "a"}'}, "invalid_value", "takes a JSON"),
        ({"text_input": ["a"]}, {"extra_files": '[{"filename": "a"}]'}, "invalid_value", "takes a"),
        ({"text_input": ["a"]}, {"extra_files": '[{"text": "a", "filename": 1}]'},
         "invalid_value", "takes a"),
        ({"text_input": ["a"]}, {"suffix": "b" * 401}, "context_length_exceeded", "context"),
    ],
)  # fmt: skip
def test_what_makes_no_gap_is_refused(
    qwen: Any, tensors: Any, parameters: Any, code: str, words: str
) -> None:
    sent, generator = answer_of(qwen, tensors, **{"suffix": AFTER, **parameters})
    assert sent.failure is not None
    assert sent.failure.code == code
    assert words in sent.error
    assert not generator.asked


def test_a_model_without_the_tokens_refuses_by_name() -> None:
    tokenizer = TransformersTokenizer({"path": "."}, demo_model_path())
    sent, generator = answer_of(tokenizer, {"text_input": ["a"]}, suffix="b")
    assert (sent.failure.code, sent.failure.param) == ("unsupported_option", "suffix")
    assert sent.error.startswith("suffix: this model fills in no gap")
    assert not generator.asked


def test_a_form_is_refused_beside_a_gap(qwen: Any) -> None:
    parts = make_parts(Recorder(), tokenizer=qwen, inputs=["regex"])
    raw = FakeRequest({"text_input": ["a"], "regex": ["[ab]+"]}, suffix="b")
    with pytest.raises(RequestError, match="leave out regex"):
        read_prompts(raw, parts)


def test_a_model_says_of_which_family_it_is(qwen: Any) -> None:
    for tokenizer, family in (
        (qwen, "Qwen2.5-Coder"),
        (TransformersTokenizer({"path": "."}, demo_model_path()), None),
    ):
        parts = make_parts(Recorder(), tokenizer=tokenizer, inputs=["prompt_only"])
        raw = FakeRequest({"text_input": [""]}, prompt_only=True)
        (prompt,) = read_prompts(raw, parts)
        assert json.loads(about_prompt(prompt, parts))["fill_in"] == family
