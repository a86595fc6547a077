// A conversation as a file: the formats in which `llmserve chat` saves one.
import { messagesOf, titleOf } from "./conversation.js";
import { create } from "./dom.js";

export function asMarkdown(conversation) {
  return `${messagesOf(conversation).map(({ role, content }) => `**${role}**\n\n${inWords(content)}`).join("\n\n")}\n`;
}

function inWords(content) {
  if (typeof content === "string") return content;
  const images = content.filter(({ type }) => type === "image_url").length;
  return [`(${images} image${images > 1 ? "s" : ""})`, ...content.flatMap(({ text }) => text ?? [])].join("\n\n");
}

export function asJson(conversation) {
  return `${JSON.stringify(messagesOf(conversation), null, 2)}\n`;
}

export function fileName(conversation, ending) {
  const words = titleOf(conversation).toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? ["conversation"];
  return `${words.slice(0, 6).join("-").slice(0, 60)}.${ending}`;
}

export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  create("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
