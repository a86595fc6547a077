// The gauges of the second view, read from /metrics while it is open.
import { metrics } from "./api.js";

const KEPT = 120;
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);
const charts = { "Tokens written per second": [], "Requests under way": [] };
let timer = null;
let before = null;

export function watchLoad(open, key) {
  clearInterval(timer);
  timer = open ? setInterval(() => look(key()), 1000) : null;
  if (open) look(key());
}

async function look(key) {
  let text;
  try {
    text = await metrics(key);
  } catch (error) {
    at("state").textContent = error.message;
    at("state").dataset.is = "bad";
    return;
  }
  const now = { at: performance.now(), written: sum(text, "vllm:generation_tokens_total") };
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const rate = seconds ? Math.max(0, now.written - before.written) / seconds : 0;
  before = now;
  const running = sum(text, "vllm:num_requests_running");
  show({
    "Under way": running,
    Waiting: sum(text, "vllm:num_requests_waiting"),
    "Tokens/s": rate.toFixed(0),
    "First token, mean": mean(text, "vllm:time_to_first_token_seconds"),
    "Per token, mean": mean(text, "vllm:request_time_per_output_token_seconds"),
    "Requests ended": sum(text, "llmserve_requests_total"),
    Refused: sum(text, "llmserve_refused_total"),
    "Tokens read": sum(text, "vllm:prompt_tokens_total"),
    "Tokens written": now.written,
  });
  draw("Tokens written per second", rate);
  draw("Requests under way", running);
}

function sum(text, name) {
  let total = 0;
  for (const line of text.split("\n")) {
    if (line.startsWith(name) && "{ ".includes(line[name.length])) total += Number(line.slice(line.lastIndexOf(" ")));
  }
  return total;
}

function mean(text, name) {
  const count = sum(text, `${name}_count`);
  return count ? `${((1000 * sum(text, `${name}_sum`)) / count).toFixed(1)} ms` : "–";
}

function show(values) {
  at("gauges").replaceChildren(...Object.entries(values).map(([name, value]) => {
    const card = document.createElement("div");
    const title = document.createElement("dt");
    const shown = document.createElement("dd");
    title.textContent = name;
    shown.textContent = value;
    card.append(title, shown);
    return card;
  }));
}

function draw(name, value) {
  const values = charts[name];
  values.push(value);
  if (values.length > KEPT) values.shift();
  let chart = at("charts").querySelector(`[data-of="${name}"]`);
  if (!chart) {
    chart = document.createElement("figure");
    chart.className = "chart";
    chart.dataset.of = name;
    chart.innerHTML = `<figcaption><span>${name}, the last two minutes</span><b></b></figcaption>
      <svg viewBox="0 0 600 120" preserveAspectRatio="none" role="img" aria-label="${name}"></svg>`;
    at("charts").append(chart);
  }
  const most = Math.max(...values);
  const x = (index) => (600 * (index + KEPT - values.length)) / (KEPT - 1);
  const points = values.map((one, index) => `${x(index)},${118 - (112 * one) / (most || 1)}`);
  chart.querySelector("b").textContent = `most ${most.toFixed(0)}`;
  chart.querySelector("svg").replaceChildren(
    shape("line", { x1: 0, y1: 119, x2: 600, y2: 119 }),
    shape("polygon", { points: `${x(0)},119 ${points.join(" ")} 600,119` }),
    shape("polyline", { points: points.join(" ") }),
  );
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
