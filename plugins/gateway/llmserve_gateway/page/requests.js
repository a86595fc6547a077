// The view for single requests: one or several at once, side by side, each with its times, and as
// code for other programs.
import { describe, Figures, rateOf } from "./answer.js";
import { CONNECTIONS, generate } from "./api.js";
import { asCurl, asPython } from "./code.js";
import { at, button, copyButton, create } from "./dom.js";
import { key } from "./models.js";

const running = new Set();
const answers = [];
// All answers since the page was last idle.
let batch = [];

export function openRequests() {
  at("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  at("many").addEventListener("click", () => {
    if (at("form").reportValidity()) for (let count = 0; count < CONNECTIONS; count += 1) send();
  });
  at("stop").addEventListener("click", () => running.forEach((controller) => controller.abort()));
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
  });
  at("form").addEventListener("input", showCode);
  at("key").addEventListener("input", showCode);
  document.addEventListener("models", showCode);
  for (const id of ["as-curl", "as-python"]) {
    at(id).previousElementSibling.append(copyButton(() => at(id).textContent));
  }
}

function request() {
  const chat = at("kind").value === "chat";
  const prompt = at("prompt").value;
  const stop = at("stop-word").value;
  return {
    path: chat ? "/v1/chat/completions" : "/v1/completions",
    body: {
      model: at("model").value,
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      temperature: Number(at("temperature").value),
      max_tokens: Number(at("tokens").value),
      ...(stop ? { stop } : {}),
    },
  };
}

function showCode() {
  const { path, body } = request();
  const keyed = key() !== "";
  at("as-curl").textContent = asCurl(location.origin, path, body, keyed);
  at("as-python").textContent = asPython(location.origin, path, body, keyed);
}

// A card for one request: its text so far, a progress bar and its figures.
class Card {
  constructor(prompt, maxTokens, stop) {
    this.maxTokens = maxTokens;
    this.figures = new Figures();
    this.text = create("p", { className: "text", dir: "auto" });
    this.progress = create("div");
    this.line = create("p", { className: "figures" }, "waiting");
    this.stop = button("Stop", stop);
    this.item = create("li", { className: "running" },
      // Above the growing text, so that the button does not move away from the pointer.
      create("div", { className: "head" }, create("p", { className: "request" }, prompt), this.stop),
      this.text, create("div", { className: "bar" }, this.progress), this.line);
    at("empty").hidden = true;
    at("answers").prepend(this.item);
  }

  add({ text, reasoning, tokens }) {
    this.figures.add(tokens);
    // The model generates a space before the first word, which would look like a mistake here.
    this.text.append(this.text.textContent ? reasoning + text : (reasoning + text).trimStart());
    this.progress.style.width = `${Math.min(100, (100 * this.figures.tokens) / this.maxTokens)}%`;
    this.show("");
  }

  show(end) {
    this.line.textContent = describe(this.figures.toJSON(), end);
  }

  end(reason) {
    this.item.classList.remove("running");
    this.stop.remove();
    this.show(reason);
  }

  fail(message) {
    this.text.classList.add("error");
    this.text.append(message);
    this.text.setAttribute("role", "alert");
    this.end("failed");
  }
}

function showTotals() {
  const rate = rateOf(batch);
  const firsts = batch.map((figures) => figures.firstMs).filter((first) => first !== null).sort((a, b) => a - b);
  at("stop").disabled = running.size === 0;
  at("now-running").textContent = running.size;
  at("now-rate").textContent = rate === null ? "–" : rate.toFixed(0);
  at("now-first").textContent = firsts.length ? `${firsts[firsts.length >> 1]} ms` : "–";
  at("now-tokens").textContent = answers.reduce((sum, figures) => sum + figures.tokens, 0);
}

async function send() {
  const { path, body } = request();
  if (!running.size) batch = [];
  const controller = new AbortController();
  const card = new Card(at("prompt").value, body.max_tokens, () => controller.abort());
  batch.push(card.figures);
  answers.push(card.figures);
  running.add(controller);
  showTotals();
  try {
    const reason = await generate(path, body, key(), controller.signal, (piece) => {
      card.add(piece);
      showTotals();
    });
    card.end(`ended by ${reason}`);
  } catch (error) {
    if (controller.signal.aborted) card.end("stopped");
    else card.fail(error.message);
  } finally {
    running.delete(controller);
    showTotals();
  }
}
