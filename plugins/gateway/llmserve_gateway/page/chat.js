// The view for a conversation: its turns, its settings, and the list of those that were had before.
import { writeAnswer } from "./answer.js";
import { isFull } from "./api.js";
import { dropFrom, editTurn, newConversation, requestOf, titleOf } from "./conversation.js";
import { at, button, create } from "./dom.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { lastOpen, loadAll, rememberOpen, remove, save, watch } from "./history.js";
import { hasImages, listenForImages, offerImages, takeImages } from "./images.js";
import { choose } from "./models.js";
import { announce, notify } from "./notice.js";
import { AnswerView, openEditor, sendOnEnter, UserView } from "./turns.js";

const SAVE_MS = 2000;
const NUMBERS = { temperature: "chat-temperature", topP: "chat-top-p", maxTokens: "chat-tokens", seed: "chat-seed" };

let conversations = [];
let current = null;
let views = new Map();
// Answers that are being written, by their conversations, which need not be the one that is shown.
const answering = new Map();
const deleted = new WeakSet();
const unsaved = new WeakSet();

export function openChat() {
  conversations = loadAll();
  show(conversations.find(({ id }) => id === lastOpen()) ?? newConversation());
  listenToComposer();
  listenForImages();
  listenToSettings();
  at("new-conversation").addEventListener("click", () => begin());
  at("delete-all").addEventListener("click", removeAll);
  at("list-toggle").addEventListener("click", () => toggleList(!at("conversations").classList.contains("open")));
  at("export-markdown").addEventListener("click", () => exportAs("md", asMarkdown, "text/markdown"));
  at("export-json").addEventListener("click", () => exportAs("json", asJson, "application/json"));
  document.addEventListener("models", () => {
    current.settings.model ??= at("chat-model").value || undefined;
    offerImages();
  });
  window.addEventListener("pagehide", () => answering.forEach((_, conversation) => save(conversation)));
  watch(takeUpChange);
}

// Opens a conversation that begins with these turns.
export function begin(turns = [], settings = {}) {
  const { system, ...same } = current.settings;
  show({ ...newConversation({ ...same, ...settings }), turns });
  if (turns.length) keep(current);
  at("message").focus();
}

// What is shown

function show(conversation) {
  current = conversation;
  rememberOpen(conversation.id);
  views = new Map();
  at("turns").replaceChildren(...conversation.turns.map((turn) => viewOf(turn).element));
  showSettings();
  showState();
  toggleList(false);
  showList();
  scrollToEnd();
}

function viewOf(turn) {
  const view = turn.role === "user"
    ? new UserView(turn, { Edit: edit })
    : new AnswerView(turn, { Regenerate: () => regenerate(turn), Edit: edit });
  views.set(turn, view);
  view.show?.(answering.get(current)?.turn === turn);
  return view;
}

function append(conversation, turn) {
  conversation.turns.push(turn);
  if (conversation === current) at("turns").append(viewOf(turn).element);
}

function showState() {
  const running = answering.has(current);
  at("send-message").textContent = running ? "Stop" : "Send";
  at("send-message").classList.toggle("main", !running);
  at("welcome").hidden = current.turns.length > 0;
  at("export").hidden = current.turns.length === 0;
}

function showList() {
  at("conversation-list").replaceChildren(...conversations.map(listItem));
  at("delete-all").hidden = conversations.length < 2;
  at("no-conversations").hidden = conversations.length > 0;
}

function listItem(conversation) {
  const title = titleOf(conversation);
  const open = button(title, () => show(conversation), { className: "open", title, dir: "auto" });
  if (conversation === current) open.setAttribute("aria-current", "true");
  const bin = button("×", () => removeOne(conversation), { className: "quiet", "aria-label": `Delete ${title}` });
  return create("li", { className: answering.has(conversation) ? "running" : "" }, open, bin);
}

function toggleList(open) {
  at("conversations").classList.toggle("open", open);
  at("list-toggle").setAttribute("aria-expanded", String(open));
}

const isAtEnd = () => window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 96;

function scrollToEnd() {
  window.scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}

// An answer is followed while its end is in sight, and not pulled away from who reads further up.
function following() {
  const follow = isAtEnd();
  return () => {
    if (follow) scrollToEnd();
  };
}

// What is said

function listenToComposer() {
  const submit = () => at("talk").requestSubmit();
  sendOnEnter(at("message"), () => {
    if (!answering.has(current)) submit();
  });
  at("talk").addEventListener("submit", (event) => {
    event.preventDefault();
    if (answering.has(current)) stop(current);
    else send(at("message").value);
  });
  // The second click of a double click does not stop what the first has sent.
  at("send-message").addEventListener("click", (event) => {
    if (event.detail > 1) event.preventDefault();
  });
  at("message").addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop(current);
  });
  for (const suggestion of document.querySelectorAll("#welcome button")) {
    suggestion.addEventListener("click", () => {
      at("message").focus();
      send(suggestion.textContent);
    });
  }
}

function send(text) {
  if (!(text.trim() || hasImages()) || !at("chat-model").reportValidity()) return;
  at("message").value = "";
  const images = takeImages();
  append(current, { role: "user", text, ...(images.length ? { images } : {}) });
  answer(current);
  scrollToEnd();
}

async function answer(conversation) {
  stop(conversation);
  const model = at("chat-model").value;
  conversation.settings.model = model;
  const request = requestOf(conversation);
  const turn = { role: "assistant", text: "", model };
  const controller = new AbortController();
  answering.set(conversation, { controller, turn });
  append(conversation, turn);
  if (isFull()) showWaiting(turn);
  changed(conversation);
  announce("Answering");
  let saved = performance.now();
  await writeAnswer(turn, request, controller.signal, (figures) => {
    views.get(turn)?.grow(figures, following);
    if (performance.now() - saved > SAVE_MS) saved = save(conversation) ? performance.now() : Infinity;
  });
  if (answering.get(conversation)?.turn === turn) answering.delete(conversation);
  // It may be dropped by now, or its conversation deleted.
  if (conversation.turns.includes(turn) && !deleted.has(conversation)) finish(conversation, turn);
  showState();
  showList();
}

function showWaiting(turn) {
  const view = views.get(turn);
  view.waiting = "waiting: the browser opens no more connections to this server at once";
  view.show(true);
}

function finish(conversation, turn) {
  const view = views.get(turn);
  const after = following();
  view?.show(false);
  if (conversation === current) after();
  announce(turn.error ?? (turn.reason === "stopped" ? "Stopped" : view?.markdown.element.textContent ?? "An answer has ended"));
  changed(conversation);
}

function stop(conversation) {
  answering.get(conversation)?.controller.abort();
}

function regenerate(turn) {
  if (!at("chat-model").reportValidity()) return;
  const dropped = droppedBy(turn);
  const undo = dropFrom(current, turn);
  redraw(current);
  notifyDropped(dropped, current, undo);
  answer(current);
}

function edit(view) {
  const { turn } = view;
  const user = turn.role === "user";
  const count = droppedBy(turn) - 1;
  openEditor(view, count ? "What follows is dropped." : "", (text) => {
    const conversation = current;
    if (!user) stop(conversation);
    else if (!at("chat-model").reportValidity()) return;
    const undo = editTurn(conversation, turn, text);
    redraw(conversation);
    if (count) notifyDropped(count, conversation, undo);
    if (user) answer(conversation);
    else changed(conversation);
    at("message").focus();
  });
}

function droppedBy(turn) {
  return current.turns.length - current.turns.indexOf(turn);
}

function notifyDropped(count, conversation, undo) {
  notify(`${count} turn${count > 1 ? "s" : ""} dropped`, () => {
    stop(conversation);
    undo();
    redraw(conversation);
    changed(conversation);
  });
}

function redraw(conversation) {
  if (conversation === current) show(conversation);
}

// What is kept

function changed(conversation) {
  keep(conversation);
  if (conversation === current) showState();
  showList();
}

function keep(conversation) {
  if (!conversation.turns.length) return;
  conversation.updated = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other.id !== conversation.id)];
  unsaved.delete(conversation);
  if (save(conversation)) return;
  unsaved.add(conversation);
  notify("This browser keeps no more: export the conversation, or delete others.");
}

function removeOne(conversation) {
  const place = conversations.indexOf(conversation);
  discard([conversation]);
  const rest = at("conversation-list").querySelectorAll(".open");
  (rest[Math.min(place, rest.length - 1)] ?? at("new-conversation")).focus();
}

function removeAll() {
  discard(conversations);
  at("new-conversation").focus();
}

function discard(removed) {
  const before = conversations;
  const shown = current;
  for (const conversation of removed) {
    stop(conversation);
    answering.delete(conversation);
    deleted.add(conversation);
    remove(conversation.id);
  }
  conversations = conversations.filter((conversation) => !removed.includes(conversation));
  const open = at("conversations").classList.contains("open");
  if (removed.includes(current)) show(newConversation({ ...current.settings, system: undefined }));
  showList();
  toggleList(open);
  const count = removed.length;
  notify(count > 1 ? `${count} conversations deleted` : "Conversation deleted", () => {
    for (const conversation of removed) {
      deleted.delete(conversation);
      save(conversation);
    }
    conversations = [...conversations.filter((other) => !before.includes(other)), ...before];
    show(shown);
  });
}

// Another tab of this browser may continue or delete what this one shows. What this one has of a later
// time stays, even if there was no room to save it.
function takeUpChange() {
  const ours = new Map(conversations.map((conversation) => [conversation.id, conversation]));
  const stored = loadAll();
  const found = stored.map((other) => {
    const own = ours.get(other.id);
    return own && (answering.has(own) || own.updated >= other.updated) ? own : other;
  });
  const kept = [...conversations.filter((own) => unsaved.has(own) && !found.some(({ id }) => id === own.id)), ...found];
  const shown = kept.find(({ id }) => id === current.id);
  const same = !shown || JSON.stringify(shown.turns) === JSON.stringify(current.turns);
  conversations = kept.map((conversation) => (conversation === shown && same ? current : conversation));
  if (same) showList();
  else show(shown);
}

function exportAs(ending, write, type) {
  download(fileName(current, ending), write(current), type);
  at("export").open = false;
}

// Settings

function listenToSettings() {
  at("chat-settings").addEventListener("input", readSettings);
  at("chat-model").addEventListener("change", () => {
    current.settings.model = at("chat-model").value;
    readSettings();
    offerImages();
  });
  document.addEventListener("click", (event) => {
    if (!at("export").contains(event.target)) at("export").open = false;
  });
  at("export").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    at("export").open = false;
    at("export").querySelector("summary").focus();
  });
}

function readSettings() {
  const { settings } = current;
  settings.system = at("system").value.trim();
  for (const [name, id] of Object.entries(NUMBERS)) {
    if (at(id).value === "") delete settings[name];
    else settings[name] = at(id).valueAsNumber;
  }
  at("system-set").hidden = !settings.system;
  if (conversations.includes(current)) save(current);
}

function showSettings() {
  const { settings } = current;
  choose(at("chat-model"), settings.model);
  offerImages();
  at("system").value = settings.system ?? "";
  at("system-set").hidden = !settings.system;
  for (const [name, id] of Object.entries(NUMBERS)) at(id).value = settings[name] ?? "";
}
