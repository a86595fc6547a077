// The models of the server, in every list of the page.
import { listModels } from "./api.js";
import { at, create } from "./dom.js";
import { setState } from "./notice.js";

const REFRESH_MS = 5000;
let models = [];
let asked = 0;

export const key = () => at("key").value;

// What models are for, by the server's words.
const TASKS = { generate: "generates text", embed: "computes embeddings", rerank: "ranks documents", classify: "tells labels of texts" };
// A server of another maker has models for text and does not say so.
const taskOf = (model) => model.task ?? "generate";

export function contextOf(id) {
  return models.find((model) => model.id === id)?.max_model_len ?? null;
}

// What is not loaded, or is another maker's, does not say whether it does: it may.
export function mayReadImages(id) {
  return models.find((model) => model.id === id)?.images ?? true;
}

// Fills the lists from the server; each keeps its choice.
export async function refreshModels() {
  asked = performance.now();
  try {
    // An adapter that is listed by its own name as well is one model.
    models = (await listModels(key())).filter(({ id, parent }) => !parent || id.startsWith(`${parent}:`));
    for (const list of document.querySelectorAll("select[data-models]")) fill(list);
    at("models").replaceChildren(...models.map(describe));
    const count = models.length;
    const ready = models.some((model) => "loaded" in model) ? "on demand" : "ready";
    setState(count ? `${count} model${count > 1 ? "s" : ""} ${ready}` : "No model is ready", count ? "ready" : "bad");
    at("key-field").hidden ||= !key();
  } catch (error) {
    if (error.status === 401) at("key-field").hidden = false;
    setState(error.message, "bad");
  }
  document.dispatchEvent(new Event("models"));
}

// A list has the models for its tasks, those for the first of them first.
function fill(list) {
  const chosen = list.dataset.wants || list.value;
  const tasks = (list.dataset.tasks ?? "generate").split(" ");
  const fitting = tasks.flatMap((task) => models.filter((model) => taskOf(model) === task));
  list.replaceChildren(...fitting.map(({ id, max_model_len: context }) =>
    new Option(context ? `${id} · ${context} tokens` : id, id, false, id === chosen)));
  if (!chosen && list.dataset.models === "second" && fitting.length > 1) list.selectedIndex = 1;
}

function describe(model) {
  const task = taskOf(model);
  const context = model.max_model_len ? `, ${model.max_model_len} tokens` : "";
  return create("li", {}, create("b", {}, model.id), ` ${TASKS[task] ?? `is for ${task}`}${context}`);
}

// Chooses a model in a list, as soon as the server has it.
export function choose(list, id) {
  list.dataset.wants = id ?? "";
  if ([...list.options].some((option) => option.value === id)) list.value = id;
}

// Models come and go while the page is open.
export function keepModels() {
  at("key").addEventListener("change", refreshModels);
  for (const list of document.querySelectorAll("select[data-models]")) {
    list.addEventListener("change", () => { list.dataset.wants = list.value; });
  }
  window.addEventListener("focus", () => {
    if (performance.now() - asked > REFRESH_MS) refreshModels();
  });
  return refreshModels();
}
