// Reads Markdown, as models write it, with markdown-it. Its tokens are shown by render.js; the HTML
// that it could write is never made, and HTML in a text is text.
import MarkdownIt from "./vendor/markdown-it.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MAX_ADDRESS = 1000;
const MAX_MARKS = 3;
const FENCE = /^(`{3,}|~{3,})/;
const NUMBER = /^ ?\d{1,9}[.)] {1,4}/;
const WORD = /[\p{L}\p{N}_]/u;

// Models end the lines of poems without a mark, write "---" below a paragraph as a rule, and indent
// by habit. A reference elsewhere in a text would change blocks that are already shown.
const reader = new MarkdownIt({ html: false, breaks: true, linkify: true })
  .disable(["reference", "lheading", "code", "entity"]);
reader.validateLink = (address) => safeAddress(address) !== null;
reader.normalizeLinkText = (address) => address;
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false }).add("ftp:", null).add("//", null);

// By CommonMark, marks beside a punctuation mark do not end what they began if a letter follows,
// as it does in languages that put no space between sentences.
reader.inline.State.prototype.scanDelims = function scanDelims(start, insideWords) {
  const mark = this.src[start];
  let end = start;
  while (this.src[end] === mark) end += 1;
  const before = this.src[start - 1] ?? " ";
  const after = this.src[end] ?? " ";
  const isMark = end - start <= MAX_MARKS;
  return {
    can_open: isMark && /\S/.test(after) && (insideWords || !WORD.test(before)),
    can_close: isMark && /\S/.test(before) && (insideWords || !WORD.test(after)),
    length: end - start,
  };
};

// Returns the address as the browser will read it, or null if nothing may link to it.
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return address.length <= MAX_ADDRESS && SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

// Returns the blocks: the tokens of each, and its source, by which one sees what a longer text has
// changed.
export function readBlocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let tokens = [];
  for (const token of reader.parse(aligned(lines).join("\n"), {})) {
    tokens.push(token);
    if (token.level > 0 || token.nesting > 0) continue;
    const [start, end] = tokens[0].map;
    blocks.push({ source: lines.slice(start, end).join("\n"), tokens });
    tokens = [];
  }
  return blocks;
}

// Models indent what belongs to an item by two spaces, whatever the width of its number.
function aligned(lines) {
  let [fence, width, missing] = [null, 0, null];
  return lines.map((line) => {
    const indent = line.search(/\S/);
    if (fence) {
      if (line.trim().startsWith(fence)) fence = null;
    } else if (indent >= 2) {
      missing ??= indent < width ? width - 2 : 0;
      return " ".repeat(missing) + line;
    } else if (indent >= 0) {
      fence = FENCE.exec(line.trim())?.[1];
      width = NUMBER.exec(line)?.[0].length ?? 0;
      missing = null;
    }
    return line;
  });
}
