// What keys have used on each of the last days, as far as the key of the page may see that.
import { usage } from "./api.js";
import { at, create } from "./dom.js";
import { key } from "./models.js";

const REFRESH_MS = 10000;
let timer = null;

export function watchUsage(open) {
  clearInterval(timer);
  timer = open ? setInterval(refresh, REFRESH_MS) : null;
  if (open) refresh();
}

async function refresh() {
  // The view says itself that the server cannot be reached, or that it needs a key.
  const rows = await usage(key()).catch(() => []);
  at("usage").hidden = !rows.length;
  // The last day first; within a day, they stay in the order of their names.
  rows.sort((one, other) => other.day.localeCompare(one.day));
  at("usage-rows").replaceChildren(...rows.map(row));
}

function row({ day, name, requests, prompt_tokens: prompt, answer_tokens: answer }) {
  const numbers = [requests, prompt, answer].map((number) => create("td", {}, number.toLocaleString("en")));
  return create("tr", {}, create("td", {}, day), create("th", { scope: "row" }, name), ...numbers);
}
