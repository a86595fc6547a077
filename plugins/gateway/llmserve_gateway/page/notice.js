// What the page says about itself: the state of the server, short notices, and for screen readers
// what an answer says once it has ended, because they cannot read one that grows.
import { at, button } from "./dom.js";

const NOTICE_MS = 12_000;
const MAX_SPOKEN = 600;
let timer = null;

export function setState(text, state) {
  at("state").textContent = text;
  at("state").dataset.is = state;
}

// Shows a notice for a while; with undo, it has a button that brings back what was removed.
export function notify(text, undo = null) {
  clearTimeout(timer);
  const close = () => {
    clearTimeout(timer);
    at("notice").hidden = true;
  };
  at("notice-text").textContent = text;
  at("notice-actions").replaceChildren(
    ...(undo ? [button("Undo", () => { close(); undo(); })] : []),
    button("×", close, { "aria-label": "Close", className: "quiet" }),
  );
  at("notice").hidden = false;
  const expire = () => {
    if (at("notice").matches(":hover, :focus-within")) timer = setTimeout(expire, NOTICE_MS);
    else close();
  };
  timer = setTimeout(expire, NOTICE_MS);
}

export function announce(text) {
  at("spoken").textContent = text.length > MAX_SPOKEN ? `${text.slice(0, MAX_SPOKEN)} …` : text;
}
