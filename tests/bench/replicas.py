"""What `serve --replicas` gains: one, two and four Tritons behind one gateway, and one killed.

    python -m tests.bench.replicas [--seconds 20] [--replicas 1 2 4]

The model sleeps for its tokens, so that a few cores suffice: eight requests at a time, 50 ms a
token. It remembers blocks of prompts as an engine with a prefix cache does, and says of how many it
knew them. People hold conversations of five turns under one of three system prompts, twenty of them
for each Triton, each asking anew as soon as the answer is there.
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
        self.known = collections.OrderedDict()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        prompt = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
        with self.slots:
            read = self.read(prompt)
            for word in [read + " ", *["word "] * 15]:
                time.sleep(0.05)
                tensor = pb.Tensor("text_output", np.array([word.encode()], dtype=object))
                sender.send(pb.InferenceResponse([tensor]))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def read(self, prompt):
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        blocks = [hashlib.sha1(prompt[:end]).digest() for end in ends]
        with self.lock:
            hits = sum(block in self.known for block in blocks)
            for block in blocks:
                self.known[block] = True
                self.known.move_to_end(block)
            while len(self.known) > REMEMBERED:
                self.known.popitem(last=False)
        return f"hits={hits}/{len(blocks)}"
"""
EACH, TURNS, TOKENS = 20, 5, 16
SYSTEMS = [f"You are number {number}, and answer what is asked. " * 12 for number in range(3)]


@dataclass
class Answer:
    sent: float
    tokens: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    ended: float = 0.0


@dataclass
class Crowd:
    """People who talk until it is over."""

    address: str
    answers: list[Answer] = field(default_factory=list)
    over: bool = False

    async def talk(self, number: int) -> None:
        chance = random.Random(number)
        while not self.over:
            said = chance.choice(SYSTEMS)
            for _ in range(TURNS):
                said += f"\nQuestion: {chance.getrandbits(800):x}\nAnswer: "
                answer = await self.ask(said)
                if answer.error or self.over:
                    break
                said += "word " * TOKENS

    async def ask(self, prompt: str) -> Answer:
        answer = Answer(time.monotonic())
        self.answers.append(answer)
        body = json.dumps({"model": "talks", "prompt": prompt, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        try:
            host, _, port = self.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
            async for line in reader:
                if line.startswith((b"data: {", b'{"error"')):
                    told = json.loads(line.removeprefix(b"data: "))
                    if "error" in told:
                        answer.error = told["error"]["message"]
                    elif text := told["choices"][0]["text"]:
                        answer.tokens.append(time.monotonic())
                        answer.text += text
            writer.close()
        except OSError as error:
            answer.error = str(error)
        answer.ended = time.monotonic()
        return answer


@dataclass
class Found:
    tokens: float
    hits: float
    killed: str


async def measure(serve: Serving, count: int, seconds: float) -> Found:
    crowd = Crowd(serve.frontend[0])
    people = [asyncio.create_task(crowd.talk(number)) for number in range(EACH * count)]
    # Until all have begun, and caches hold what they will.
    await asyncio.sleep(5)
    begun = time.monotonic()
    await asyncio.sleep(seconds)
    over = time.monotonic()
    tokens = sum(begun <= at < over for answer in crowd.answers for at in answer.tokens)
    read = [re.findall(r"=(\d+)/(\d+)", answer.text) for answer in crowd.answers]
    hits, blocks = (sum(int(pair[each]) for found in read for pair in found) for each in (0, 1))
    if errors := [answer.error for answer in crowd.answers if answer.error]:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    killed = await kill(serve, crowd) if count > 1 else ""
    crowd.over = True
    await asyncio.gather(*people)
    return Found(tokens / (over - begun), hits / blocks, killed)


async def kill(serve: Serving, crowd: Crowd) -> str:
    """Kill one of the Tritons, and say whose streams that cost."""
    victim = list(serve.processes("bin/tritonserver"))[-1]
    killed = time.monotonic()
    at_it = sum(not answer.ended for answer in crowd.answers)
    os.kill(victim, signal.SIGKILL)
    again = await asyncio.to_thread(serve.said, r"replica \d: triton: ready", killed)
    await asyncio.sleep(3)
    failed = [answer for answer in crowd.answers if answer.error]
    unbegun = sum(not answer.tokens for answer in failed)
    last = max((answer.ended for answer in failed), default=killed) - killed
    return (
        f"{len(failed)} of {at_it} streams failed, {unbegun} of them before a token, the last "
        f"{last:.1f} s after; ready again after {again - killed:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    table = Table("Tritons", "tokens/s", "of one's, each", "prefix hits", "one killed")
    first = None
    with tempfile.TemporaryDirectory() as home:
        folder = repository(Path(home), talks=MODEL)
        for count in args.replicas:
            serve = Serving(str(folder), "--replicas", str(count))
            try:
                found = asyncio.run(measure(serve, count, args.seconds))
                assert serve.end()[0] == 0
                eventually(serve.nothing_is_left)
            finally:
                serve.close()
            first = first or found.tokens / count
            cells = [f"{found.tokens:.0f}", f"{found.tokens / count / first:.2f}"]
            table.add_row(str(count), *cells, f"{found.hits:.2f}", found.killed)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    table.caption = f"{os.cpu_count()} cores; load of the machine in the end {load}"
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
