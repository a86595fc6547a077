// The conversations of this browser, which leave it only as requests to the server of this page.
import { readConversation, withoutImages } from "./conversation.js";

const PREFIX = "llmserve/conversation/";
const OPEN = "llmserve/open";

// Some browsers refuse any storage to a page; then conversations last as long as it does.
function storage() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

// Returns the conversations, the newest first.
export function loadAll() {
  const kept = storage();
  const names = kept ? Object.keys(kept).filter((name) => name.startsWith(PREFIX)) : [];
  return names.map((name) => parse(kept.getItem(name))).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

function parse(text) {
  try {
    return readConversation(JSON.parse(text));
  } catch {
    return null;
  }
}

// Returns whether it is kept: the storage may be full or refused.
export function save(conversation) {
  try {
    storage().setItem(PREFIX + conversation.id, JSON.stringify(withoutImages(conversation)));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  storage()?.removeItem(PREFIX + id);
}

// Which one this tab of the browser shows, so that a reload shows it again.
export function rememberOpen(id) {
  try {
    window.sessionStorage.setItem(OPEN, id);
  } catch { /* then a reload shows the newest */ }
}

export function lastOpen() {
  try {
    return window.sessionStorage.getItem(OPEN);
  } catch {
    return null;
  }
}

// Calls onChange when another tab of this browser has changed a conversation.
export function watch(onChange) {
  window.addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) onChange(event.key?.slice(PREFIX.length) ?? null);
  });
}
