// A conversation as data: its turns, its settings, and the request that continues it.

const MAX_TITLE = 60;

export function newConversation(settings = {}) {
  const now = Date.now();
  return { id: newId(), created: now, updated: now, settings: { ...settings }, turns: [] };
}

// Without https, browsers have no randomUUID.
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function titleOf({ turns }) {
  const line = turns.find((turn) => turn.role === "user")?.text.trim().split("\n", 1)[0] ?? "";
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line || "New conversation";
}

// What is said so far, as a model reads it. Templates refuse two turns in a row of one side, as
// they are left where an answer failed.
export function messagesOf({ settings, turns }) {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const { role, text, images = [] } of turns) {
    const last = messages.at(-1);
    if (!text && !images.length) continue;
    if (last?.role === role) last.content = joined(last.content, contentOf(text, images));
    else messages.push({ role, content: contentOf(text, images) });
  }
  return messages;
}

function contentOf(text, images) {
  const shown = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return shown.length ? [...shown, ...partsOf(text)] : text;
}

const partsOf = (content) => (typeof content !== "string" ? content : content ? [{ type: "text", text: content }] : []);

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  return [...partsOf(first), ...partsOf(second)];
}

// A browser keeps a few megabytes, which one photo would fill: of images only their number.
export function withoutImages(conversation) {
  const turns = conversation.turns.map(({ images, ...turn }) => (images ? { ...turn, lost: images.length } : turn));
  return { ...conversation, turns };
}

export function requestOf(conversation) {
  const { model, temperature, topP, maxTokens, seed } = conversation.settings;
  const options = { temperature, top_p: topP, max_tokens: maxTokens, seed };
  const given = Object.entries(options).filter(([, value]) => Number.isFinite(value));
  return { model, messages: messagesOf(conversation), ...Object.fromEntries(given) };
}

// Removes the turns from this one on, and returns a function that brings all back.
export function dropFrom(conversation, turn) {
  const before = [...conversation.turns];
  conversation.turns = before.slice(0, before.indexOf(turn));
  return () => { conversation.turns = before; };
}

// Changes what one side said, which everything after it was said to.
export function editTurn(conversation, turn, text) {
  const undo = dropFrom(conversation, turn);
  const images = turn.images ? { images: turn.images } : {};
  conversation.turns.push({ role: turn.role, text, ...images, ...(turn.role === "assistant" ? { model: turn.model, reason: "edited" } : {}) });
  return undo;
}

// Returns a stored conversation, with nothing but what this page understands, or null.
export function readConversation(value) {
  const isText = (part) => typeof part === "string";
  if (!value || !isText(value.id) || !Array.isArray(value.turns)) return null;
  const turns = value.turns.filter((turn) => turn && isText(turn.text) && (turn.role === "user" || turn.role === "assistant"));
  const settings = value.settings && typeof value.settings === "object" ? value.settings : {};
  return {
    id: value.id,
    created: Number(value.created) || 0,
    updated: Number(value.updated) || 0,
    settings: {
      ...(isText(settings.model) ? { model: settings.model } : {}),
      ...(isText(settings.system) ? { system: settings.system } : {}),
      ...Object.fromEntries(["temperature", "topP", "maxTokens", "seed"].filter((name) => Number.isFinite(settings[name])).map((name) => [name, settings[name]])),
    },
    turns: turns.map(readTurn),
  };
}

function readTurn(turn) {
  const read = { role: turn.role, text: turn.text };
  for (const name of ["model", "reasoning", "reason", "error"]) if (typeof turn[name] === "string") read[name] = turn[name];
  if (Number.isInteger(turn.lost) && turn.lost > 0) read.lost = turn.lost;
  if (Number.isFinite(turn.figures?.tokens)) read.figures = turn.figures;
  return read;
}
