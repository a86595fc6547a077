// The models that are loaded on demand, with buttons to load and to unload each.
import { listModels, order } from "./api.js";
import { at, button, create } from "./dom.js";
import { key } from "./models.js";
import { notify } from "./notice.js";

const REFRESH_MS = 2000;
const busy = new Set();
let timer = null;

export function watchModels(open) {
  clearInterval(timer);
  timer = open ? setInterval(refresh, REFRESH_MS) : null;
  if (open) refresh();
}

async function refresh() {
  // The view says itself that the server cannot be reached.
  const models = (await listModels(key()).catch(() => [])).filter((model) => "loaded" in model);
  at("on-demand").hidden = !models.length;
  const focused = document.activeElement?.dataset.model;
  at("on-demand-models").replaceChildren(...models.map(row));
  if (focused) at("on-demand-models").querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
}

function row(model) {
  const state = busy.has(model.id) ? "changing" : model.state;
  const notes = [state, model.loaded ? size(model.size) : null, model.pinned ? "pinned" : null, model.why || null];
  const path = model.loaded ? "/models/unload" : "/models/load";
  return create("li", { className: "row" },
    create("b", {}, model.id),
    create("span", { className: "hint" }, notes.filter(Boolean).join(" · ")),
    button(model.loaded ? "Unload" : "Load", () => change(path, model.id), {
      className: "quiet", disabled: busy.has(model.id), data: { model: model.id },
      "aria-label": `${model.loaded ? "Unload" : "Load"} ${model.id}`,
    }));
}

async function change(path, id) {
  busy.add(id);
  refresh();
  try {
    await order(path, id, key());
  } catch (error) {
    notify(error.message);
  } finally {
    busy.delete(id);
    refresh();
  }
}

function size(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.round(bytes / 1e6)} MB`;
}
