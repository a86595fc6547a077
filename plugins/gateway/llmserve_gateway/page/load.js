// The gauges of the second view, read from /metrics while it is open.
import { metrics } from "./api.js";

const KEPT = 120;
let timer = null;
let before = null;
const rates = [];

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
    document.getElementById("state").textContent = error.message;
    return;
  }
  const now = { at: performance.now(), written: sum(text, "vllm:generation_tokens_total"), ended: sum(text, "llmserve_requests_total") };
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const rate = seconds ? Math.max(0, now.written - before.written) / seconds : 0;
  before = now;
  rates.push(rate);
  if (rates.length > KEPT) rates.shift();
  const count = sum(text, "vllm:time_to_first_token_seconds_count");
  const mean = count ? (1000 * sum(text, "vllm:time_to_first_token_seconds_sum")) / count : 0;
  show({
    "Under way": sum(text, "vllm:num_requests_running"),
    Waiting: sum(text, "vllm:num_requests_waiting"),
    "Requests ended": now.ended,
    "Tokens written": now.written,
    "Tokens/s": rate.toFixed(1),
    "First token, mean ms": mean.toFixed(0),
  });
  draw();
}

function sum(text, name) {
  let total = 0;
  for (const line of text.split("\n")) {
    if (line.startsWith(name) && "{ ".includes(line[name.length])) total += Number(line.slice(line.lastIndexOf(" ")));
  }
  return total;
}

function show(values) {
  const list = document.getElementById("gauges");
  list.replaceChildren(...Object.entries(values).map(([name, value]) => {
    const card = document.createElement("div");
    const title = document.createElement("dt");
    const shown = document.createElement("dd");
    title.textContent = name;
    shown.textContent = value;
    card.append(title, shown);
    return card;
  }));
}

function draw() {
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, index) => `${(600 * (index + KEPT - rates.length)) / (KEPT - 1)},${116 - (110 * rate) / most}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  document.getElementById("rate").replaceChildren(line);
}
