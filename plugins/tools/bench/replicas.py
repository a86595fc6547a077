"""What `serve --replicas` gains: one, two and four Tritons behind one gateway, and one killed.

    python -m plugins.tools.bench.replicas [--seconds 20] [--replicas 1 2 4]

The model sleeps for its tokens, so that a few cores are enough: eight concurrent requests, 50 ms
per token. It remembers blocks of prompts, as an engine with a prefix cache does, and reports how
many it knew. Twenty users per Triton hold conversations of five turns under one of three system
prompts; each sends the next question as soon as the answer has arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.live.servers import Serving, eventually, repository

MODEL = """
import collections, hashlib, threading, time
import numpy as np
import triton_python_backend_utils as pb

BLOCK, REMEMBERED = 128, 2048

class TritonPythonModel:
    def initialize(self, args):
        self.slots = threading.Semaphore(8)
        self.lock = threading.Lock()
        self.blocks = collections.OrderedDict()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        prompt = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
        with self.slots:
            hits = self.look_up(prompt)
            for word in [hits + " ", *["word "] * 15]:
                time.sleep(0.05)
                tensor = pb.Tensor("text_output", np.array([word.encode()], dtype=object))
                sender.send(pb.InferenceResponse([tensor]))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def look_up(self, prompt):
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        blocks = [hashlib.sha1(prompt[:end]).digest() for end in ends]
        with self.lock:
            hits = sum(block in self.blocks for block in blocks)
            for block in blocks:
                self.blocks[block] = True
                self.blocks.move_to_end(block)
            while len(self.blocks) > REMEMBERED:
                self.blocks.popitem(last=False)
        return f"hits={hits}/{len(blocks)}"
"""
USERS, TURNS, TOKENS = 20, 5, 16
PROMPTS = [f"You are number {number}, and answer what is asked. " * 12 for number in range(3)]


@dataclass
class Answer:
    sent: float
    tokens: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    ended: float = 0.0


@dataclass
class Users:
    """Users who hold conversations until ``stopped`` is set."""

    address: str
    answers: list[Answer] = field(default_factory=list)
    stopped: bool = False

    async def talk(self, number: int) -> None:
        chance = random.Random(number)
        while not self.stopped:
            prompt = chance.choice(PROMPTS)
            for _ in range(TURNS):
                prompt += f"\nQuestion: {chance.getrandbits(800):x}\nAnswer: "
                answer = await self.ask(prompt)
                if answer.error or self.stopped:
                    break
                prompt += "word " * TOKENS

    async def ask(self, prompt: str) -> Answer:
        answer = Answer(time.monotonic())
        self.answers.append(answer)
        body = json.dumps({"model": "talks", "prompt": prompt, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        )
        try:
            host, _, port = self.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
            async for line in reader:
                if line.startswith((b"data: {", b'{"error"')):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        answer.error = event["error"]["message"]
                    elif text := event["choices"][0]["text"]:
                        answer.tokens.append(time.monotonic())
                        answer.text += text
            writer.close()
        except OSError as error:
            answer.error = str(error)
        answer.ended = time.monotonic()
        return answer


@dataclass
class Result:
    tokens: float
    hits: float
    killed: str


async def measure(serve: Serving, count: int, seconds: float) -> Result:
    users = Users(serve.frontend[0])
    tasks = [asyncio.create_task(users.talk(number)) for number in range(USERS * count)]
    # By then, all users have begun and the caches are warm.
    await asyncio.sleep(5)
    started = time.monotonic()
    await asyncio.sleep(seconds)
    ended = time.monotonic()
    tokens = sum(started <= at < ended for answer in users.answers for at in answer.tokens)
    counts = re.findall(r"=(\d+)/(\d+)", " ".join(answer.text for answer in users.answers))
    hits, blocks = sum(int(hits) for hits, _ in counts), sum(int(blocks) for _, blocks in counts)
    if errors := [answer.error for answer in users.answers if answer.error]:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    killed = await kill(serve, users) if count > 1 else ""
    users.stopped = True
    await asyncio.gather(*tasks)
    return Result(tokens / (ended - started), hits / blocks, killed)


async def kill(serve: Serving, users: Users) -> str:
    """Kill one of the Tritons, and describe which streams failed."""
    victim = list(serve.processes("bin/tritonserver"))[-1]
    killed = time.monotonic()
    running = sum(not answer.ended for answer in users.answers)
    os.kill(victim, signal.SIGKILL)
    ready = await asyncio.to_thread(serve.wait_for, r"replica \d: triton: ready", killed)
    await asyncio.sleep(3)
    failed = [answer for answer in users.answers if answer.error]
    early = sum(not answer.tokens for answer in failed)
    last = max((answer.ended for answer in failed), default=killed) - killed
    return (
        f"{len(failed)} of {running} streams failed, {early} of them before a token, the last "
        f"{last:.1f} s after the kill; ready again after {ready - killed:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    table = Table("Tritons", "tokens/s", "each, relative", "prefix hits", "one killed")
    first = None
    with tempfile.TemporaryDirectory() as home:
        folder = repository(Path(home), talks=MODEL)
        for count in args.replicas:
            serve = Serving(str(folder), "--replicas", str(count))
            try:
                result = asyncio.run(measure(serve, count, args.seconds))
                assert serve.stop()[0] == 0
                eventually(serve.nothing_is_left)
            finally:
                serve.close()
            first = first or result.tokens / count
            cells = [f"{result.tokens:.0f}", f"{result.tokens / count / first:.2f}"]
            table.add_row(str(count), *cells, f"{result.hits:.2f}", result.killed)
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    table.caption = f"{os.cpu_count()} cores; load of the machine at the end {load}"
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
