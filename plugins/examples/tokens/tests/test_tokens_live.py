"""Through a real Triton: the answers are those of the tokenizer that it replaces."""

from __future__ import annotations

from llmserve.testing import LiveTriton

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


def test_answers_are_those_of_the_transformers_tokenizer(triton: LiveTriton) -> None:
    ours, theirs = triton.build("hf", tokenizer="tokenizers"), triton.build("hf")
    for prompt in ("Programming in C++ is like", " naïve — 東京 🙂\n\n", "<|endoftext|>Hello"):
        assert triton.client.generate(ours, prompt, max_tokens=24) == triton.client.generate(
            theirs, prompt, max_tokens=24
        )
    answers = [triton.client.generate(m, messages=TALK, max_tokens=24) for m in (ours, theirs)]
    assert answers[0] == answers[1]
    assert answers[0].text
