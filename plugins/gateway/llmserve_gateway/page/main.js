// The page's views: asking a model, and watching the load.
import { ask, listModels } from "./api.js";
import { asCurl, asPython } from "./code.js";
import { watchLoad } from "./load.js";

const at = (id) => document.getElementById(id);
// More connections than these a browser does not open to one server.
const MANY = 6;
// What came within so many seconds came at once, and has no speed to speak of.
const AT_ONCE = 0.05;
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

function say(text, is) {
  at("state").textContent = text;
  at("state").dataset.is = is;
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
    this.began = this.last = performance.now();
    this.tokens = 0;
    this.item = element("li", "running");
    this.text = element("p", "text");
    this.bar = element("div", "");
    const bar = element("div", "bar");
    bar.append(this.bar);
    this.figures = element("p", "figures", "waiting");
    this.stop = element("button", "", "Stop");
    this.stop.type = "button";
    // Above the text, which grows: who is about to press it finds it where it was.
    const head = element("div", "head");
    head.append(element("p", "asked", prompt), this.stop);
    this.item.append(head, this.text, bar, this.figures);
    at("empty").hidden = true;
    at("answers").prepend(this.item);
    answers.push(this);
  }

  add(piece, tokens) {
    this.last = performance.now();
    this.first ??= this.last;
    // The space before the first word is the model's, and looks like a mistake here.
    this.text.append(this.text.textContent ? piece : piece.trimStart());
    this.tokens = tokens ?? this.tokens;
    this.bar.style.width = `${Math.min(100, (100 * this.tokens) / this.most)}%`;
    this.show("");
  }

  show(end) {
    const first = this.first ? `first token ${Math.round(this.first - this.began)} ms` : "";
    const seconds = (this.last - (this.first ?? this.began)) / 1000;
    const speed = this.tokens > 1 && seconds > AT_ONCE ? `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
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

// What all requests since the page was last at rest make together.
let together = [];

function showTogether() {
  const told = together.filter((one) => one.first);
  const tokens = together.reduce((sum, one) => sum + one.tokens, 0);
  const begin = Math.min(...told.map((one) => one.first));
  const seconds = (Math.max(...told.map((one) => one.last)) - begin) / 1000;
  const firsts = told.map((one) => one.first - one.began).sort((a, b) => a - b);
  at("now-running").textContent = running.size;
  at("now-rate").textContent = seconds > AT_ONCE ? ((tokens - told.length) / seconds).toFixed(0) : "–";
  at("now-first").textContent = firsts.length ? `${Math.round(firsts[firsts.length >> 1])} ms` : "–";
  at("now-tokens").textContent = answers.reduce((sum, one) => sum + one.tokens, 0);
}

async function send() {
  const { path, body } = request();
  if (!running.size) together = [];
  const answer = new Answer(at("prompt").value, body.max_tokens);
  together.push(answer);
  const leaving = new AbortController();
  answer.stop.addEventListener("click", () => leaving.abort());
  running.add(leaving);
  at("stop").disabled = false;
  showTogether();
  try {
    const reason = await ask(path, body, at("key").value, leaving.signal, (piece, tokens) => {
      answer.add(piece, tokens);
      showTogether();
    });
    answer.end(`ended by ${reason ?? "stop"}`);
  } catch (error) {
    if (leaving.signal.aborted) answer.end("stopped");
    else answer.fail(error.message);
  } finally {
    running.delete(leaving);
    at("stop").disabled = running.size === 0;
    showTogether();
  }
}

async function connect() {
  try {
    const models = await listModels(at("key").value);
    const chosen = at("model").value;
    at("model").replaceChildren(...models.map(({ id, max_model_len: context }) =>
      new Option(context ? `${id} · ${context} tokens` : id, id, false, id === chosen)));
    const count = models.length;
    say(count ? `${count} model${count > 1 ? "s" : ""} ready` : "No model is ready", count ? "ready" : "bad");
    showCode();
  } catch (error) {
    at("key-field").hidden = error.status !== 401;
    say(error.message, "bad");
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
  if (at("form").reportValidity()) for (let count = 0; count < MANY; count += 1) send();
});
at("form").addEventListener("input", showCode);
at("key").addEventListener("change", connect);
at("stop").addEventListener("click", () => running.forEach((leaving) => leaving.abort()));
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
connect();
