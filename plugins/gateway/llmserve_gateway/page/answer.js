// An answer that is being written, with its times and counts.
import { generate } from "./api.js";
import { key } from "./models.js";

// Tokens that arrive within this time have no meaningful rate.
const MIN_SECONDS = 0.05;

export class Figures {
  constructor() {
    this.started = this.last = performance.now();
    this.first = null;
    this.tokens = 0;
  }

  add(tokens) {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens = tokens ?? this.tokens;
  }

  get firstMs() {
    return this.first === null ? null : Math.round(this.first - this.started);
  }

  get rate() {
    const seconds = (this.last - (this.first ?? this.started)) / 1000;
    return this.tokens > 1 && seconds > MIN_SECONDS ? (this.tokens - 1) / seconds : null;
  }

  // What is kept of them with an answer.
  toJSON() {
    return { first: this.firstMs, tokens: this.tokens, rate: this.rate };
  }
}

export function describe({ first, tokens, rate }, end = "") {
  return [
    typeof first === "number" ? `first token ${first} ms` : "",
    `${tokens} token${tokens === 1 ? "" : "s"}`,
    typeof rate === "number" ? `${rate.toFixed(1)} tokens/s` : "",
    end,
  ].filter(Boolean).join(" · ");
}

export function rateOf(answers) {
  const started = answers.filter((figures) => figures.first !== null);
  const tokens = answers.reduce((sum, figures) => sum + figures.tokens, 0);
  const begin = Math.min(...started.map((figures) => figures.first));
  const seconds = (Math.max(...started.map((figures) => figures.last)) - begin) / 1000;
  return seconds > MIN_SECONDS ? (tokens - started.length) / seconds : null;
}

// Asks for an answer, and writes it into a turn as it comes; onPiece gets its figures so far.
export async function writeAnswer(turn, request, signal, onPiece) {
  const figures = new Figures();
  try {
    turn.reason = await generate("/v1/chat/completions", request, key(), signal, ({ text, reasoning, tokens }) => {
      // The model writes a space before its first word, which would look like a mistake here.
      turn.text = turn.text ? turn.text + text : text.trimStart();
      if (reasoning) turn.reasoning = (turn.reasoning ?? "") + reasoning;
      figures.add(tokens);
      onPiece(figures);
    });
  } catch (error) {
    if (signal.aborted) turn.reason = "stopped";
    else turn.error = error.message;
  }
  turn.figures = figures.toJSON();
}
