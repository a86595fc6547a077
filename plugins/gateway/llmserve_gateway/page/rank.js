// The view that shows a ranking: documents in the order of how well they answer a question.
import { rank } from "./api.js";
import { at, create } from "./dom.js";
import { key } from "./models.js";
import { announce } from "./notice.js";

let controller = null;

export function openRank() {
  at("rank-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (controller) controller.abort();
    else ask();
  });
  for (const id of ["query", "documents"]) {
    at(id).addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("rank-form").requestSubmit();
    });
  }
  document.addEventListener("models", showState);
}

// One a line, or with empty lines between them if a document has several.
export function documentsOf(text) {
  const between = /\n\s*\n/.test(text.trim()) ? /\n\s*\n/ : /\n/;
  return text.split(between).map((part) => part.trim()).filter(Boolean);
}

function showState() {
  at("rank-send").textContent = controller ? "Stop" : "Rank";
  at("rank-send").classList.toggle("main", !controller);
  const none = at("rank-model").options.length === 0;
  at("rank-send").disabled = none;
  at("no-ranker").hidden = !none;
}

async function ask() {
  const documents = documentsOf(at("documents").value);
  if (!documents.length) return;
  controller = new AbortController();
  showState();
  announce("Ranking");
  const started = performance.now();
  try {
    const body = { model: at("rank-model").value, query: at("query").value, documents };
    const answer = await rank(body, key(), controller.signal);
    show(answer, documents, performance.now() - started);
  } catch (error) {
    if (!controller.signal.aborted) fail(error.message);
  } finally {
    controller = null;
    showState();
  }
}

function show({ results, usage, meta }, documents, milliseconds) {
  const best = documents[results[0].index];
  at("rank-empty").hidden = true;
  const figures = `${results.length} documents · ${usage.total_tokens} tokens · ${milliseconds.toFixed(0)} ms`;
  at("rank-figures").textContent = [figures, ...(meta?.warnings ?? [])].join(" · ");
  at("rank-figures").classList.remove("error");
  at("ranking").replaceChildren(...results.map(({ index, relevance_score: score }) => {
    const filled = create("div");
    filled.style.width = `${100 * share(score, results)}%`;
    return create("li", {},
      create("p", { className: "text", dir: "auto" }, documents[index]),
      create("div", { className: "bar", "aria-hidden": "true" }, filled),
      create("p", { className: "figures" }, `${score.toFixed(4)} · document ${index + 1}`));
  }));
  announce(`Best: ${best}`);
}

// Probabilities fill their part of a bar; scores of another kind are drawn from the worst to the best.
function share(score, results) {
  const scores = results.map(({ relevance_score: other }) => other);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  if (low >= 0 && high <= 1) return score;
  return high > low ? (score - low) / (high - low) : 1;
}

function fail(message) {
  at("ranking").replaceChildren();
  at("rank-empty").hidden = true;
  at("rank-figures").textContent = message;
  at("rank-figures").classList.add("error");
  announce(message);
}
