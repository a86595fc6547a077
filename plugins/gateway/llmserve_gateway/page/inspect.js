// The last requests of all clients, for who may see them: noted only while this view is open.
import { inspect } from "./api.js";
import { at, create } from "./dom.js";
import { key } from "./models.js";

const REFRESH_MS = 2000;
let timer = null;
let shown = new Map();

export function watchInspect(open) {
  clearInterval(timer);
  timer = open ? setInterval(refresh, REFRESH_MS) : null;
  if (open) refresh();
  else show([]);
}

async function refresh() {
  try {
    show(await inspect(key()));
    at("inspect-problem").hidden = true;
  } catch (error) {
    show([]);
    at("inspect-problem").textContent = error.message;
    at("inspect-problem").hidden = false;
  }
}

// What has been opened stays so: a request is drawn again only when its prompt is known.
function show(requests) {
  const before = shown;
  shown = new Map();
  for (const request of requests) {
    const name = `${request.id} ${request.when} ${request.prompt !== null}`;
    shown.set(name, before.get(name) ?? card(request));
  }
  at("inspected").replaceChildren(...shown.values());
  at("inspect-empty").hidden = shown.size > 0;
}

function card(request) {
  const time = new Date(request.when * 1000).toLocaleTimeString("en");
  const title = [time, request.path, request.model, request.key, String(request.status), request.outcome];
  return create("li", { className: "card" }, create("details", {},
    create("summary", {}, title.filter(Boolean).join(" · ")),
    create("p", { className: "figures" }, figures(request)),
    ...part("Error", request.error),
    ...part("Without effect", request.ignored.join(", ")),
    ...part("What was sent", request.body),
    ...part("Options of the model", request.options === "{}" ? "" : request.options),
    ...part("What the model read", request.prompt ?? "")));
}

function figures(request) {
  const times = { load: request.load_ms, queue: request.queue_ms, "first token": request.first_ms, all: request.total_ms };
  const known = Object.entries(times).filter(([, value]) => typeof value === "number");
  const tokens = `${request.input_tokens} tokens read, ${request.cached_tokens ?? 0} of them kept, ${request.output_tokens} written`;
  return [tokens, ...known.map(([name, value]) => `${name} ${value} ms`)].join(" · ");
}

function part(title, text) {
  return text ? [create("h3", {}, title), create("pre", { tabIndex: 0, dir: "auto" }, text)] : [];
}
