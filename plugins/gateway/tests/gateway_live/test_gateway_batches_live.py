"""A batch in front of a real Triton, with the official client."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from llmserve.testing import LiveTriton

from .process import Gateway

QUESTIONS = ["What is the capital of Japan?", "What is the capital of France?", "Who are you?"]


def test_a_batch_answers_what_its_requests_answer(
    triton: LiveTriton, model: str, tmp_path: Path
) -> None:
    bodies = [
        {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 40, "n": 2}
        for text in QUESTIONS
    ]
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, body in enumerate([*bodies, {"model": "none", "messages": []}])
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    gateway = Gateway(triton, "--batches", str(tmp_path / "batches"))
    client: Any = gateway.client()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = {}
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        choices = answer["response"]["body"]["choices"]
        answers[answer["custom_id"]] = [choice["message"]["content"] for choice in choices]
    for number, body in enumerate(bodies):
        direct = gateway.post(url, body).json()["choices"]
        assert answers[str(number)] == [choice["message"]["content"] for choice in direct]
    (error,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(error)["custom_id"] == str(len(bodies))
    assert json.loads(error)["response"]["status_code"] == 400
    assert gateway.stop() == 0
