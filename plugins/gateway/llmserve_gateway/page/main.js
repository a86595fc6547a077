// The two views of the page: requests to a model, and the load.
import { generate, listModels } from "./api.js";
import { asCurl, asPython } from "./code.js";
import { watchLoad } from "./load.js";

const at = (id) => document.getElementById(id);
// Browsers do not open more connections to one server.
const PARALLEL_REQUESTS = 6;
// Tokens that arrive within this time have no meaningful rate.
const MIN_SECONDS = 0.05;
const running = new Set();
const answers = [];

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
  const keyed = at("key").value !== "";
  at("as-curl").textContent = asCurl(location.origin, path, body, keyed);
  at("as-python").textContent = asPython(location.origin, path, body, keyed);
}

function setState(text, state) {
  at("state").textContent = text;
  at("state").dataset.is = state;
}

function newElement(name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

// A card on the page for one request: its text so far, a progress bar and its statistics.
class Answer {
  constructor(prompt, maxTokens) {
    this.maxTokens = maxTokens;
    this.started = this.last = performance.now();
    this.tokens = 0;
    this.item = newElement("li", "running");
    this.text = newElement("p", "text");
    this.bar = newElement("div", "");
    const bar = newElement("div", "bar");
    bar.append(this.bar);
    this.figures = newElement("p", "figures", "waiting");
    this.stop = newElement("button", "", "Stop");
    this.stop.type = "button";
    // Above the growing text, so that the button does not move away from the pointer.
    const head = newElement("div", "head");
    head.append(newElement("p", "request", prompt), this.stop);
    this.item.append(head, this.text, bar, this.figures);
    at("empty").hidden = true;
    at("answers").prepend(this.item);
    answers.push(this);
  }

  add(piece, tokens) {
    this.last = performance.now();
    this.first ??= this.last;
    // The model generates a space before the first word, which would look like a mistake here.
    this.text.append(this.text.textContent ? piece : piece.trimStart());
    this.tokens = tokens ?? this.tokens;
    this.bar.style.width = `${Math.min(100, (100 * this.tokens) / this.maxTokens)}%`;
    this.show("");
  }

  show(end) {
    const first = this.first ? `first token ${Math.round(this.first - this.started)} ms` : "";
    const seconds = (this.last - (this.first ?? this.started)) / 1000;
    const speed = this.tokens > 1 && seconds > MIN_SECONDS ? `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    this.figures.textContent = [first, `${this.tokens} tokens`, speed, end].filter(Boolean).join(" · ");
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

// All requests since the page was last idle.
let batch = [];

function showTotals() {
  const started = batch.filter((answer) => answer.first);
  const tokens = batch.reduce((sum, answer) => sum + answer.tokens, 0);
  const begin = Math.min(...started.map((answer) => answer.first));
  const seconds = (Math.max(...started.map((answer) => answer.last)) - begin) / 1000;
  const firsts = started.map((answer) => answer.first - answer.started).sort((a, b) => a - b);
  at("now-running").textContent = running.size;
  at("now-rate").textContent = seconds > MIN_SECONDS ? ((tokens - started.length) / seconds).toFixed(0) : "–";
  at("now-first").textContent = firsts.length ? `${Math.round(firsts[firsts.length >> 1])} ms` : "–";
  at("now-tokens").textContent = answers.reduce((sum, answer) => sum + answer.tokens, 0);
}

async function send() {
  const { path, body } = request();
  if (!running.size) batch = [];
  const answer = new Answer(at("prompt").value, body.max_tokens);
  batch.push(answer);
  const controller = new AbortController();
  answer.stop.addEventListener("click", () => controller.abort());
  running.add(controller);
  at("stop").disabled = false;
  showTotals();
  try {
    const reason = await generate(path, body, at("key").value, controller.signal, (piece, tokens) => {
      answer.add(piece, tokens);
      showTotals();
    });
    answer.end(`ended by ${reason ?? "stop"}`);
  } catch (error) {
    if (controller.signal.aborted) answer.end("stopped");
    else answer.fail(error.message);
  } finally {
    running.delete(controller);
    at("stop").disabled = running.size === 0;
    showTotals();
  }
}

async function connect() {
  try {
    const models = await listModels(at("key").value);
    const chosen = at("model").value;
    at("model").replaceChildren(...models.map(({ id, max_model_len: context }) =>
      new Option(context ? `${id} · ${context} tokens` : id, id, false, id === chosen)));
    const count = models.length;
    setState(count ? `${count} model${count > 1 ? "s" : ""} ready` : "No model is ready", count ? "ready" : "bad");
    showCode();
  } catch (error) {
    at("key-field").hidden = error.status !== 401;
    setState(error.message, "bad");
  }
}

function choose(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    at(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  watchLoad(tab.id === "tab-load", () => at("key").value);
}

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const next = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    next.focus();
    choose(next);
  });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(at(button.dataset.copy).textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("many").addEventListener("click", () => {
  if (at("form").reportValidity()) for (let count = 0; count < PARALLEL_REQUESTS; count += 1) send();
});
at("form").addEventListener("input", showCode);
at("key").addEventListener("change", connect);
at("stop").addEventListener("click", () => running.forEach((controller) => controller.abort()));
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
connect();
