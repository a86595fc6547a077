// One turn of a conversation on the page: what was said, and what can be done with it.
import { describe } from "./answer.js";
import { button, copyButton, create } from "./dom.js";
import { imagesOf } from "./images.js";
import { MarkdownView } from "./render.js";

const ENDS = { stop: "", edited: "edited", length: "cut off at its limit of tokens" };

// Enter sends where there are keys for new lines as well, and not while a word is being composed.
export function sendOnEnter(area, send, plain = true) {
  const keyboard = plain && window.matchMedia("(pointer: fine)").matches;
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    if (event.ctrlKey || event.metaKey || (keyboard && !event.shiftKey)) {
      event.preventDefault();
      send();
    }
  });
}

// What can be done with a turn: by the names of the buttons, functions that get its view.
function toolsOf(view, actions) {
  const buttons = Object.entries(actions).map(([name, action]) => button(name, () => action(view)));
  return create("div", { className: "tools" }, copyButton(() => view.turn.text), ...buttons);
}

export class UserView {
  constructor(turn, actions) {
    this.turn = turn;
    const said = create("div", { className: "said", dir: "auto" }, turn.text);
    this.body = [create("h3", { className: "who" }, "You"), imagesOf(turn), said, toolsOf(this, actions)];
    this.element = create("li", { className: "turn user" }, ...this.body);
  }
}

export class AnswerView {
  constructor(turn, actions, name = turn.model) {
    this.turn = turn;
    this.markdown = new MarkdownView();
    this.markdown.element.classList.add("answer");
    this.thinking = new MarkdownView();
    this.summary = create("summary");
    this.thoughts = create("details", { className: "thinking", hidden: true }, this.summary, this.thinking.element);
    this.error = create("p", { className: "error" });
    this.figures = create("p", { className: "figures" });
    this.tools = toolsOf(this, actions);
    this.body = [
      create("h3", { className: "who" }, name ?? "Answer"),
      this.thoughts, this.markdown.element, this.error,
      create("div", { className: "foot" }, this.figures, this.tools),
    ];
    this.element = create("li", { className: "turn assistant" }, ...this.body);
    this.frame = null;
  }

  // Draws once for all pieces that come between two pictures of the screen.
  grow(figures, follow = () => () => {}) {
    this.live = figures;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const after = follow();
      this.show(true);
      after();
    });
  }

  show(running) {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    const { text, reasoning, error, model, reason, figures } = this.turn;
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    this.markdown.show(text);
    this.showThoughts(reasoning, running && !text);
    this.error.textContent = error ?? "";
    const shown = figures ?? this.live?.toJSON();
    const end = running ? "" : error ? "failed" : ENDS[reason] ?? reason ?? "interrupted";
    const counts = shown?.tokens ? describe(shown, end) : end || (running ? this.waiting ?? "" : "");
    this.figures.textContent = [model, counts].filter(Boolean).join(" · ");
    this.tools.hidden = running;
  }

  showThoughts(reasoning, thinking) {
    this.thoughts.hidden = !reasoning;
    if (!reasoning) return;
    this.summary.textContent = thinking ? "Thinking …" : "Thoughts";
    this.thoughts.classList.toggle("now", thinking);
    this.thinking.show(reasoning);
  }
}

// Replaces a turn by a field in which it is changed; `note` says what that does to others.
export function openEditor(view, note, save) {
  const area = create("textarea", { value: view.turn.text, rows: Math.min(12, view.turn.text.split("\n").length + 1), "aria-label": "Edit this turn", dir: "auto" });
  const close = () => {
    view.element.replaceChildren(...view.body);
    view.element.classList.remove("editing");
    view.element.querySelector(".tools button").focus();
  };
  const user = view.turn.role === "user";
  const finish = () => {
    if (area.value.trim()) save(area.value);
  };
  const tools = create("div", { className: "row" },
    button(user ? "Send" : "Save", finish, { className: "main" }), button("Cancel", close), create("span", { className: "hint" }, note));
  sendOnEnter(area, finish, user);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  view.element.classList.add("editing");
  view.element.replaceChildren(area, tools);
  area.focus();
}
