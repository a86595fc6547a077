"""A server with OpenAI's API around a model of nothing but hashes, with one fault if a test wants.

The model costs microseconds for each token, and depends on all that a fault may change: the ids
before, their order and number, and the position.
"""

from __future__ import annotations

import base64
import json
import queue
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from llmserve_certify.reference import Noise

_SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
_TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know get through back "
)
_WORDS = _TEXT.split()
_SMILE = "🙂".encode()
BEGIN, END = 0, 1
_BYTES = len(_SPECIALS)
_FIRST_WORD = _BYTES + 256
SIZE = _FIRST_WORD + 2 * len(_WORDS)
CONTEXT = 512
_BATCH = 16
ROUNDING = 0.1
"""How much 16 bits change a score: of a real model in bfloat16, about as much."""
_PATIENCE = 10.0
"""Seconds for the next of the requests that were announced."""


class ToyModel:
    """The model, and what certify compares with."""

    name = "toy"
    context: int | None = CONTEXT
    begin: int | None = BEGIN
    ends = frozenset({END})
    special_texts: tuple[str, ...] = _SPECIALS
    chats = True

    def __init__(self, precision: str = "float32") -> None:
        self.precision = precision
        self._texts: list[bytes] = [
            *(b"" for _ in _SPECIALS),
            *(bytes([value]) for value in range(256)),
            *(f" {word}".encode() for word in _WORDS),
            *(word.encode() for word in _WORDS),
        ]
        self._ids = {text: number for number, text in enumerate(self._texts) if len(text) > 1}
        self._longest = max(map(len, self._ids))

    def describe(self) -> dict[str, str]:
        return {"architecture": "hashes"}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids = [BEGIN] if special else []
        while text:
            token = next((n for n, s in enumerate(_SPECIALS) if text.startswith(s)), None)
            if token is not None:
                ids.append(token)
                text = text[len(_SPECIALS[token]) :]
                continue
            cut = min((at for s in _SPECIALS if (at := text.find(s)) > 0), default=len(text))
            ids += self._plain(text[:cut].encode())
            text = text[cut:]
        return ids

    def _plain(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 1, -1):
                if (token := self._ids.get(data[at : at + size])) is not None:
                    yield token
                    at += size
                    break
            else:
                yield _BYTES + data[at]
                at += 1

    def decode(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        return b"".join(self._texts[token] for token in answer).decode(errors="replace")

    def render(self, messages: Sequence[Mapping[str, Any]], *, opened: bool = True) -> str:
        parts = [f"<|{message['role']}|>{message['content']}" for message in messages]
        return "<s>" + "".join(parts) + ("<|assistant|>" if opened else "")

    def scores(self, ids: Sequence[int], shift: int = 0) -> Any:
        # Of all ids: where two prompts could have the same answers, a fault would have two names.
        key = hash((*ids, len(ids) + shift)) % 2**32
        scores = 2 * np.random.default_rng(key).standard_normal(SIZE).astype(np.float32)
        scores[:_FIRST_WORD] -= 20
        scores[END] += 20 + 0.12 * (len(ids) - 14)
        scores[_BYTES + _SMILE[0]] += 22
        tail = [token - _BYTES for token in ids[-3:]]
        for size in (3, 2, 1):
            if tail[-size:] == list(_SMILE[:size]):
                scores[_BYTES + _SMILE[size]] += 100
                break
        return scores

    def noise(self, precision: str, sequences: Sequence[Sequence[int]]) -> Noise:
        size = 1e-5 if precision == "float32" else 4 * ROUNDING
        return Noise(size, size, sum(map(len, sequences)))


@dataclass
class Job:
    prompt: list[int]
    options: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, list[tuple[int, float]]]] = field(default_factory=list)
    reason: str = "length"
    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0


class ToyServer:
    """``fault`` is one of those that :data:`FAULTS` maps to the check that must name it.

    ``rounding`` is how much scores differ beside others, as those of 16 bits do.
    """

    def __init__(self, fault: str = "", rounding: float = 0.0) -> None:
        self.model, self.fault, self.rounding = ToyModel(), fault, rounding
        self._shown: dict[str, list[list[str]]] = {}
        """Which images each question was asked with."""
        self.strict = False
        """Refuses fields that an older server with OpenAI's API does not know."""
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.answered = 0
        self._coming = self._at_once = 0

    @contextmanager
    def serving(self) -> Iterator[str]:
        server = _HttpServer(("127.0.0.1", 0), _Handler)
        server.toy = self
        threads = [
            threading.Thread(target=t) for t in (self._work, lambda: server.serve_forever(0.02))
        ]
        for thread in threads:
            thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            self.jobs.put(None)
            server.shutdown()
            server.server_close()
            for thread in threads:
                thread.join()

    @contextmanager
    def expecting(self, requests: int, at_once: int) -> Iterator[None]:
        """Make full batches of requests that are about to come, however slow the machine is."""
        self._coming, self._at_once = requests, at_once
        try:
            yield
        finally:
            self._coming = 0

    def _work(self) -> None:
        while job := self.jobs.get():
            batch = [job]
            announced = min(self._coming, self._at_once)
            with suppress(queue.Empty):
                while len(batch) < _BATCH:
                    wait = _PATIENCE if len(batch) < announced else 0.0
                    other = self.jobs.get(bool(wait), wait or None)
                    if other is None:
                        self.jobs.put(None)
                        break
                    batch.append(other)
            self._coming -= len(batch)
            self._answer(batch)

    def _answer(self, batch: list[Job]) -> None:
        longest = max(len(job.prompt) for job in batch)
        for job in batch:
            if self.fault == "neighbours-length" and "max_tokens" in batch[0].options:
                job.options["max_tokens"] = batch[0].options["max_tokens"]
            padded = longest - len(job.prompt) if self.fault == "padded-positions" else 0
            self._generate(job, padded, len(batch))
        if self.fault == "neighbours-text" and len(batch) > 1:
            for job, other in zip(batch[1:], batch, strict=False):
                job.text = f"{other.text}\n{job.text}"
        if self.fault == "order-changed-once-in-fifty":
            for job in batch:
                self.answered += 1
                if self.answered % 50 == 0 and len(batch) > 1:
                    other = batch[0] if job is not batch[0] else batch[1]
                    for name in ("ids", "text", "reason", "logprobs"):
                        mine, its = getattr(job, name), getattr(other, name)
                        setattr(job, name, its)
                        setattr(other, name, mine)
        if self.fault == "usage-summed":
            total = sum(job.output_tokens for job in batch)
            for job in batch:
                job.output_tokens = total
        for job in batch:
            job.done.set()

    def _generate(self, job: Job, shift: int, beside: int) -> None:
        options, ids, model = job.options, job.ids, self.model
        dropped = self.fault == "seed-dropped" or (
            self.fault == "seed-dropped-beside-others" and beside > 1
        )
        rng = np.random.default_rng(None if dropped else options.get("seed"))
        stops = options.get("stop") or []
        for _ in range(options.get("max_tokens") or 16):
            raw = model.scores([*job.prompt, *ids], shift).astype(np.float64)
            if self.rounding and beside > 1:
                changes = np.random.default_rng(beside + len(ids)).standard_normal(SIZE)
                raw += self.rounding * changes
            scores = self._adjusted(raw.copy(), job)
            if len(ids) < options.get("min_tokens", 0) or options.get("ignore_eos"):
                scores[END] = -np.inf
            token = self._chosen(scores, options, rng)
            if token == END:
                job.reason = "stop"
                break
            ids.append(token)
            if options.get("logprobs") is not None:
                logs = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
                top = np.argsort(-logs)[: options["logprobs"]]
                job.logprobs.append((token, logs[token], [(int(t), logs[t]) for t in top]))
            text = model.decode((), ids)
            if found := [text.index(stop) for stop in stops if stop in text]:
                end = min(found)
                leaked = self.fault == "stop-word-leaked"
                job.text, job.reason = text if leaked else text[:end], "stop"
                break
        else:
            job.text = model.decode((), ids)
        job.text = job.text or ("" if stops and job.reason == "stop" else model.decode((), ids))
        if self.fault == "prompt-echoed" and "prompt" in options:
            whole = model.decode((), job.prompt)
            job.text = f"<s>{whole}{job.text}" if whole.strip() else job.text
        if self.fault == "reason-always-stop":
            job.reason = "stop"
        job.input_tokens, job.output_tokens = len(job.prompt), len(ids)

    def _adjusted(self, scores: Any, job: Job) -> Any:
        options = job.options
        if (size := options.get("repetition_penalty", 1)) != 1:
            for token in {*job.prompt, *job.ids}:
                value = scores[token]
                scores[token] = value / size if value > 0 else value * size
        for token, times in Counter(job.ids).items():
            scores[token] -= options.get("frequency_penalty", 0) * times
            scores[token] -= options.get("presence_penalty", 0)
        for name, bias in (options.get("logit_bias") or {}).items():
            scores[int(name)] += bias
        ignored = self.fault == "bad-words-ignored"
        for word in () if ignored else options.get("bad_words") or ():
            for text in (word, f" {word}"):
                for token in self.model.encode(text, special=False)[:1]:
                    scores[token] = -np.inf
        return scores

    def _chosen(self, scores: Any, options: Mapping[str, Any], rng: Any) -> int:
        if not (temperature := options.get("temperature", 1.0)):
            return int(np.argmax(scores))
        chances = np.exp((scores - scores.max()) / temperature)
        chances /= chances.sum()
        order = np.argsort(-chances)
        keep = np.ones(SIZE, bool)
        if (top_k := options.get("top_k", 0)) > 0:
            keep[order[top_k:]] = False
        if (top_p := options.get("top_p", 1.0)) < 1 and self.fault != "top-p-ignored":
            before = np.cumsum(chances[order]) - chances[order]
            keep[order[before >= top_p]] = False
        keep &= chances >= options.get("min_p", 0.0) * chances.max()
        chances = np.where(keep, chances, 0)
        return int(rng.choice(SIZE, p=chances / chances.sum()))

    def prompt(self, body: Mapping[str, Any]) -> list[int]:
        if "messages" in body:
            text = self.model.render([self._read(message) for message in body["messages"]])
            if self.fault == "template-twice":
                text = self.model.render([{"role": "user", "content": text}])
            return self.model.encode(text, special=False)
        ids = self.model.encode(body["prompt"])
        return [BEGIN, *ids] if self.fault == "begin-doubled" else ids

    def _read(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message as the model reads it, in which each image is a word."""
        if not isinstance(message["content"], list):
            return message
        *images, asked = message["content"]
        seen = [f"{zlib.crc32(image['image_url']['url'].encode()):x}" for image in images]
        if self.fault == "images-ignored":
            seen = []
        elif self.fault == "order-of-images-lost":
            seen.sort()
        before = self._shown.setdefault(asked["text"], [])
        before.append(seen)
        if self.fault == "images-kept-by-question" and seen in before[:-1]:
            # A cache that goes by the text has what came last.
            seen = before[-2]
        return {**message, "content": " ".join([*seen, asked["text"]])}


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 256
    toy: ToyServer


_RANGES = {"max_tokens": (1, 10**6), "temperature": (0, 10), "top_p": (1e-9, 1), "min_p": (0, 1)}


def _problem(body: Any) -> str:
    if not isinstance(body, dict):
        return "the body is not an object"
    if body.get("model") != "toy":
        return "no such model"
    if not isinstance(body.get("prompt", ""), str) or not (
        body.get("prompt") or body.get("messages")
    ):
        return "prompt must be a text"
    for name, (low, high) in _RANGES.items():
        value = body.get(name, low)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            return f"{name} must be between {low} and {high}"
    if not all(isinstance(word, str) for word in body.get("stop") or ()):
        return "stop must be texts"
    return "no constraints here" if body.keys() & {"response_format", "structured_outputs"} else ""


def _problem_of_images(body: Mapping[str, Any]) -> str:
    contents = [message["content"] for message in body.get("messages") or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    for url in (part["image_url"]["url"] for part in parts if part["type"] == "image_url"):
        try:
            content = base64.b64decode(url.removeprefix("data:image/png;base64,"), validate=True)
        except ValueError:
            return "an image is no data URL"
        if not (content.startswith(b"\x89PNG") and b"IEND" in content[-8:]):
            return "an image cannot be read"
    return ""


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "toy", "owned_by": "tests"}]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        toy = self.server.toy
        if self.path.endswith("/systemone"):
            return self._send(404, {"error": {"message": "no such path"}})
        try:
            body = json.loads(data)
        except ValueError:
            return self._send(400, {"error": {"message": "no JSON"}})
        if problem := _problem(body):
            return self._send(400, {"error": {"message": problem}})
        if toy.fault == "images-refused" and b"image_url" in data:
            return self._send(400, {"error": {"message": "this model reads only text"}})
        if problem := _problem_of_images(body) if toy.fault != "bad-images-accepted" else "":
            return self._send(400, {"error": {"message": problem}})
        if toy.strict and "stream_options" in body:
            return self._send(422, {"detail": [{"type": "extra_forbidden"}]})
        job = Job(toy.prompt(body), body)
        if len(job.prompt) + body.get("max_tokens", 16) > CONTEXT:
            return self._send(400, {"error": {"message": "over the context"}})
        if toy.fault == "long-refused" and len(job.prompt) > 100:
            return self._send(500, {"error": {"message": "too long for max_length"}})
        toy.jobs.put(job)
        job.done.wait()
        if body.get("stream"):
            return self._stream(job)
        return self._send(200, {"choices": [self._choice(job)], "usage": self._usage(job)})

    def _usage(self, job: Job) -> dict[str, int]:
        return {"prompt_tokens": job.input_tokens, "completion_tokens": job.output_tokens}

    def _choice(self, job: Job) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": job.text, "finish_reason": job.reason}
        if job.logprobs:
            decode = self.server.toy.model.decode
            choice["logprobs"] = {
                "tokens": [decode((), [token]) for token, _, _ in job.logprobs],
                "token_logprobs": [value for _, value, _ in job.logprobs],
                "top_logprobs": [
                    {f"{decode((), [t])}#{t}": value for t, value in top}
                    for _, _, top in job.logprobs
                ],
            }
        return choice

    def _stream(self, job: Job) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for at in range(0, len(job.text), 7):
            text = job.text[at : at + 7]
            if self.server.toy.fault == "spaces-lost-in-streams" and at:
                text = text.removeprefix(" ")
            self._event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        end = {"index": 0, "text": "", "finish_reason": job.reason}
        self._event({"choices": [end], "usage": self._usage(job)})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: Any) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


FAULTS = {
    "begin-doubled": "begin-token",
    "template-twice": "chat-template",
    "neighbours-length": "own-length",
    "neighbours-text": "no-foreign-text",
    "seed-dropped": "seed",
    "seed-dropped-beside-others": "seed",
    "stop-word-leaked": "stop-words",
    "usage-summed": "usage",
    "spaces-lost-in-streams": "stream-joins",
    "top-p-ignored": "top-p",
    "reason-always-stop": "finish-reason",
    "order-changed-once-in-fifty": "own-answer",
    "padded-positions": "same-in-a-batch",
    "prompt-echoed": "no-echo",
    "long-refused": "prompts-are-answered",
    "bad-words-ignored": "bad-words",
    "images-ignored": "images-are-seen",
    "order-of-images-lost": "order-of-images",
    "images-kept-by-question": "own-images",
    "bad-images-accepted": "bad-images",
}
"""Each fault, and the check that must name it."""
