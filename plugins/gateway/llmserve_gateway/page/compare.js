// The view in which two models answer one prompt, side by side.
import { writeAnswer } from "./answer.js";
import { begin } from "./chat.js";
import { newConversation, requestOf } from "./conversation.js";
import { at, create } from "./dom.js";
import { announce } from "./notice.js";
import { AnswerView, sendOnEnter } from "./turns.js";

const SIDES = ["left", "right"];
let controllers = [];

export function openCompare() {
  sendOnEnter(at("compare-prompt"), () => at("compare-form").requestSubmit());
  at("compare-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (controllers.length) controllers.forEach((controller) => controller.abort());
    else ask(at("compare-prompt").value);
  });
}

async function ask(prompt) {
  if (!prompt.trim()) return;
  controllers = SIDES.map(() => new AbortController());
  showState();
  at("compare-empty").hidden = true;
  const columns = create("ol", { className: "columns" });
  const round = create("li", { className: "round" }, create("p", { className: "said", dir: "auto" }, prompt), columns);
  at("rounds").prepend(round);
  announce("Answering");
  const answers = await Promise.all(SIDES.map((side, index) => answer(side, prompt, columns, controllers[index])));
  announce(answers.map(({ model, text, error }) => `${model}: ${error ?? text}`).join("\n"));
  controllers = [];
  showState();
}

function showState() {
  const running = controllers.length > 0;
  at("compare-send").textContent = running ? "Stop" : "Send to both";
  at("compare-send").classList.toggle("main", !running);
}

async function answer(side, prompt, columns, controller) {
  const conversation = newConversation(settingsOf(side));
  const { model, temperature } = conversation.settings;
  const turn = { role: "assistant", text: "", model };
  const name = Number.isFinite(temperature) ? `${model} · temperature ${temperature}` : model;
  const question = { role: "user", text: prompt };
  const view = new AnswerView(turn, { "Go on in the chat": () => goOn([question, turn], conversation.settings) }, name);
  conversation.turns = [question];
  columns.append(view.element);
  view.show(true);
  await writeAnswer(turn, requestOf(conversation), controller.signal, (figures) => view.grow(figures));
  view.show(false);
  return turn;
}

function goOn(turns, settings) {
  location.hash = "chat";
  begin(structuredClone(turns), settings);
}

function settingsOf(side) {
  const number = (id) => (at(id).value === "" ? undefined : at(id).valueAsNumber);
  return {
    model: at(`${side}-model`).value,
    temperature: number(`${side}-temperature`),
    maxTokens: number("compare-tokens"),
    system: at("compare-system").value.trim(),
  };
}
