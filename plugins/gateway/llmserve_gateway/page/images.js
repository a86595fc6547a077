// The images that go with the next message: chosen, dropped or pasted, and shown small.
import { at, button, create } from "./dom.js";
import { mayReadImages } from "./models.js";
import { notify } from "./notice.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 8;
const MOST_MB = 20;
let waiting = [];

export function listenForImages() {
  const chosen = at("choose-image");
  chosen.addEventListener("change", () => {
    // A copy: the list itself is emptied, so that the same file can be chosen again.
    add([...chosen.files]);
    chosen.value = "";
  });
  const view = at("chat");
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  view.addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  view.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
  at("message").addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    add([...event.clipboardData.files]);
  });
}

// Whether there is a button for images: where the chosen model reads them.
export function offerImages() {
  const model = at("chat-model").value;
  at("choose-image").closest("label").hidden = !mayReadImages(model);
  if (waiting.length && !mayReadImages(model)) notify(`${model} reads only text: no image is sent.`);
}

export const hasImages = () => waiting.length > 0 && mayReadImages(at("chat-model").value);

// Returns what waits, which goes with a message now; it waits on for a model that reads images.
export function takeImages() {
  if (!hasImages()) return [];
  const taken = waiting.map(({ url }) => url);
  waiting = [];
  show();
  return taken;
}

async function add(files) {
  const model = at("chat-model").value;
  for (const file of files) {
    if (!mayReadImages(model)) notify(`${model} reads only text.`);
    else if (!TYPES.includes(file.type)) notify(`${file.name} is no PNG, JPEG, WebP or GIF.`);
    else if (file.size > MOST_MB * 1e6) notify(`${file.name} is over ${MOST_MB} MB.`);
    else if (waiting.length >= MOST) notify(`A message has at most ${MOST} images.`);
    else {
      const image = { name: file.name, url: null };
      // Its place, before others are read.
      waiting.push(image);
      image.url = await read(file);
      if (!image.url) {
        waiting = waiting.filter((other) => other !== image);
        notify(`${file.name} cannot be read.`);
      }
    }
  }
  show();
}

function read(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => resolve(null));
    reader.readAsDataURL(file);
  });
}

function show() {
  const items = waiting.filter(({ url }) => url).map((image) => create("li", {},
    create("img", { src: image.url, alt: image.name }),
    button("×", () => {
      waiting = waiting.filter((other) => other !== image);
      show();
      at("message").focus();
    }, { className: "quiet", "aria-label": `Remove ${image.name}` })));
  at("images").replaceChildren(...items);
  at("images").hidden = items.length === 0;
}

// Images of a turn; those of an earlier visit are not kept.
export function imagesOf({ images = [], lost = 0 }) {
  const shown = images.map((url, number) => create("li", {}, create("img", { src: url, alt: `Image ${number + 1}` })));
  if (lost) shown.push(create("li", { className: "hint" }, `${lost} image${lost > 1 ? "s" : ""}, not kept by this browser`));
  return shown.length ? create("ul", { className: "images" }, ...shown) : "";
}
