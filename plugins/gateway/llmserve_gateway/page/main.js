// The page's views: asking a model, and watching the load.
import { ask, listModels } from "./api.js";
import { asCurl, asPython } from "./code.js";
import { watchLoad } from "./load.js";

const at = (id) => document.getElementById(id);
const running = new Set();

function request() {
  const chat = at("kind").value === "chat";
  const prompt = at("prompt").value;
  return {
    path: chat ? "/v1/chat/completions" : "/v1/completions",
    body: {
      model: at("model").value,
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      temperature: Number(at("temperature").value),
      max_tokens: Number(at("tokens").value),
    },
  };
}

function showCode() {
  const { path, body } = request();
  at("as-curl").textContent = asCurl(location.origin, path, body);
  at("as-python").textContent = asPython(location.origin, path, body);
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

// One request's place on the page: its text as it comes, a bar and its figures.
class Answer {
  constructor(prompt, most) {
    this.most = most;
    this.began = performance.now();
    this.tokens = 0;
    this.item = element("li", "");
    this.text = element("p", "text");
    this.bar = element("div", "");
    const bar = element("div", "bar");
    bar.append(this.bar);
    this.figures = element("span", "", "waiting");
    this.stop = element("button", "", "Stop");
    this.stop.type = "button";
    const line = element("p", "figures");
    line.append(this.figures, this.stop);
    this.item.append(element("p", "asked", prompt), this.text, bar, line);
    at("answers").prepend(this.item);
  }

  add(piece, tokens) {
    this.first ??= performance.now();
    this.text.append(piece);
    this.tokens = tokens ?? this.tokens;
    this.bar.style.width = `${Math.min(100, (100 * this.tokens) / this.most)}%`;
    this.show("");
  }

  show(end) {
    const first = this.first ? `first token ${Math.round(this.first - this.began)} ms` : "";
    const seconds = (performance.now() - (this.first ?? this.began)) / 1000;
    const speed = this.tokens > 1 && seconds > 0 ? `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    this.figures.textContent = [first, `${this.tokens} tokens`, speed, end].filter(Boolean).join(" · ");
  }

  end(reason) {
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

async function send(event) {
  event.preventDefault();
  const { path, body } = request();
  const answer = new Answer(at("prompt").value, body.max_tokens);
  const leaving = new AbortController();
  answer.stop.addEventListener("click", () => leaving.abort());
  running.add(leaving);
  at("stop").disabled = false;
  try {
    const reason = await ask(path, body, at("key").value, leaving.signal, (piece, tokens) => answer.add(piece, tokens));
    answer.end(`ended by ${reason ?? "stop"}`);
    at("state").textContent = "Answered";
  } catch (error) {
    if (leaving.signal.aborted) answer.end("stopped");
    else answer.fail(error.message);
  } finally {
    running.delete(leaving);
    at("stop").disabled = running.size === 0;
  }
}

async function connect() {
  try {
    const names = await listModels(at("key").value);
    const chosen = at("model").value;
    at("model").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    at("state").textContent = names.length ? `${names.length} model${names.length > 1 ? "s" : ""} ready` : "No model is ready";
    showCode();
  } catch (error) {
    at("key-field").hidden = error.status !== 401;
    at("state").textContent = error.message;
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
at("form").addEventListener("submit", send);
at("form").addEventListener("input", showCode);
at("key").addEventListener("change", connect);
at("stop").addEventListener("click", () => running.forEach((leaving) => leaving.abort()));
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
connect();
