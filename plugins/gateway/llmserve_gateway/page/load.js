// The gauges and charts of the load view, read from /metrics while it is open.
import { metrics } from "./api.js";
import { at, create } from "./dom.js";
import { key } from "./models.js";
import { setState } from "./notice.js";

const MAX_VALUES = 120;
const SVG = "http://www.w3.org/2000/svg";
const charts = { "Generated tokens per second": [], "Running requests": [] };
let timer = null;
let previous = null;
let asking = false;

export function watchLoad(open) {
  clearInterval(timer);
  timer = open ? setInterval(refresh, 1000) : null;
  if (open) refresh();
}

// While answers use all of the browser's connections this waits for one, once and not each second.
async function refresh() {
  if (asking) return;
  asking = true;
  try {
    show(await metrics(key()));
  } catch (error) {
    setState(error.message, "bad");
  } finally {
    asking = false;
  }
}

function show(text) {
  const current = { time: performance.now(), tokens: sum(text, "vllm:generation_tokens_total") };
  const seconds = previous ? (current.time - previous.time) / 1000 : 0;
  const rate = seconds ? Math.max(0, current.tokens - previous.tokens) / seconds : 0;
  previous = current;
  const running = sum(text, "vllm:num_requests_running");
  showGauges({
    Running: running,
    Waiting: sum(text, "vllm:num_requests_waiting"),
    "Tokens/s": rate.toFixed(0),
    "First token, mean": mean(text, "vllm:time_to_first_token_seconds"),
    "Per token, mean": mean(text, "vllm:request_time_per_output_token_seconds"),
    "Finished requests": sum(text, "llmserve_requests_total"),
    Refused: sum(text, "llmserve_refused_total"),
    "Prompt tokens": sum(text, "vllm:prompt_tokens_total"),
    "Generated tokens": current.tokens,
  });
  drawChart("Generated tokens per second", rate);
  drawChart("Running requests", running);
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

function showGauges(values) {
  at("gauges").replaceChildren(...Object.entries(values).map(([name, value]) =>
    create("div", {}, create("dt", {}, name), create("dd", {}, String(value)))));
}

function newChart(name) {
  const picture = svgElement("svg", { viewBox: "0 0 600 120", preserveAspectRatio: "none", role: "img", "aria-label": name });
  const caption = create("figcaption", {}, create("span", {}, `${name}, the last two minutes`), create("b"));
  const chart = create("figure", { className: "chart", data: { of: name } }, caption, picture);
  at("charts").append(chart);
  return chart;
}

function drawChart(name, value) {
  const values = charts[name];
  values.push(value);
  if (values.length > MAX_VALUES) values.shift();
  const chart = at("charts").querySelector(`[data-of="${name}"]`) ?? newChart(name);
  const maximum = Math.max(...values);
  const x = (index) => (600 * (index + MAX_VALUES - values.length)) / (MAX_VALUES - 1);
  const points = values.map((item, index) => `${x(index)},${118 - (112 * item) / (maximum || 1)}`);
  chart.querySelector("b").textContent = `max ${maximum.toFixed(0)}`;
  chart.querySelector("svg").replaceChildren(
    svgElement("line", { x1: 0, y1: 119, x2: 600, y2: 119 }),
    svgElement("polygon", { points: `${x(0)},119 ${points.join(" ")} 600,119` }),
    svgElement("polyline", { points: points.join(" ") }),
  );
}

function svgElement(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
