// Elements of the page. Text only ever becomes text: no file here reads HTML.

export const at = (id) => document.getElementById(id);

// Returns an element; a child is a node or a string, and properties that are null are left out.
export function create(name, properties = {}, ...children) {
  const element = document.createElement(name);
  // Before dir="auto", which browsers would look up anew for each child.
  element.append(...children);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  return element;
}

export function button(label, action, properties = {}) {
  return create("button", { type: "button", onclick: action, ...properties }, label);
}

// Over http, only localhost has a clipboard of its own; elsewhere a selection is copied.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = create("textarea", { value: text, className: "hidden-text", readOnly: true });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("this browser does not let the page copy");
  return undefined;
}

export function copyButton(getText, label = "Copy") {
  const element = button(label, async () => {
    let done = "Copied";
    try {
      await copyText(getText());
    } catch {
      done = "Not copied";
    }
    element.textContent = done;
    setTimeout(() => { element.textContent = label; }, 1500);
  });
  return element;
}
