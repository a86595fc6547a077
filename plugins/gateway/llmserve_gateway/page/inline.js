// Reads the text of one block of Markdown: emphasis, code, links. The result is a list of nodes
// without any HTML: { is: "text" | "code" | "strong" | "em" | "strike" | "link" | "break", … }.
//
// A text may be hostile, so that nothing here takes much more time than its length: what is open
// at one time is bounded, and so is the length of an address.

const MAX_OPEN = 24;
const MAX_MARKS = 3;
const MAX_ADDRESS = 1000;
const MAX_BRACKETS = 16;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const PLAIN = /[^\\`*_~[\]!<h\n]+/y;
const IN_ANGLES = /<((?:https?:\/\/|mailto:)[^\s<>]{1,1000})>/y;
const BARE = /https?:\/\/[^\s<>"`]{1,1000}/y;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

// Returns the address as the browser will read it, or null if nothing may link to it.
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

export function readInline(text) {
  return new Reader(text).read();
}

// The text of nodes without their forms, for a title or an announcement.
export function textOf(nodes) {
  return nodes.map((node) => (node.inside ? textOf(node.inside) : node.is === "break" ? "\n" : node.text)).join("");
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = [];
    // Marks of emphasis and brackets that may still find their ends; each is one of the nodes.
    this.open = [];
    this.fences = fencesOf(text);
  }

  read() {
    while (this.at < this.text.length) this.step();
    return this.nodes;
  }

  step() {
    switch (this.text[this.at]) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.emphasis();
      case "!": return this.text[this.at + 1] === "[" ? this.bracket("![") : this.plain(1);
      case "[": return this.bracket("[");
      case "]": return this.closeBracket();
      case "<": return this.matched(IN_ANGLES, (match) => [match[0], match[1]]);
      case "h": return this.bareAddress();
      case "\n": return this.lineEnd();
      default: return this.plain(this.match(PLAIN)[0].length);
    }
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  plain(length) {
    this.push(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  push(text) {
    const last = this.nodes.at(-1);
    if (last?.is === "text" && !this.open.includes(last)) last.text += text;
    else this.nodes.push({ is: "text", text });
  }

  escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") {
      this.nodes.push({ is: "break" });
      this.at += 2;
    } else if (ESCAPABLE.test(next)) {
      this.push(next);
      this.at += 2;
    } else {
      this.plain(1);
    }
  }

  // Line ends are kept: models end the lines of poems and addresses without any mark.
  lineEnd() {
    this.nodes.push({ is: "break" });
    this.at += 1;
    while (this.text[this.at] === " ") this.at += 1;
  }

  code() {
    const length = runLength(this.text, this.at);
    const start = this.at + length;
    const ends = this.fences.get(length) ?? [];
    while (ends.length && ends.at(-1) < start) ends.pop();
    if (!ends.length) return this.plain(length);
    const end = ends.at(-1);
    const code = this.text.slice(start, end).replaceAll("\n", " ");
    const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
    this.nodes.push({ is: "code", text: padded ? code.slice(1, -1) : code });
    this.at = end + length;
    return undefined;
  }

  matched(pattern, read) {
    const match = this.match(pattern);
    const [source, address] = match ? read(match) : [];
    const href = address && address.length <= MAX_ADDRESS ? safeAddress(address) : null;
    if (!href) return this.plain(1);
    this.nodes.push({ is: "link", href, inside: [{ is: "text", text: address }] });
    this.at += source.length;
    return undefined;
  }

  bareAddress() {
    if (!this.text.startsWith("http", this.at) || WORD.test(this.text[this.at - 1] ?? "")) return this.plain(1);
    return this.matched(BARE, ([found]) => {
      const address = withoutEnding(found);
      return [address, address];
    });
  }

  emphasis() {
    const mark = this.text[this.at];
    const count = runLength(this.text, this.at);
    if (count > MAX_MARKS) return this.plain(count);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + count] ?? " ";
    this.at += count;
    const closes = /\S/.test(before) && !(mark === "_" && WORD.test(after));
    const opens = /\S/.test(after) && !(mark === "_" && WORD.test(before));
    const left = closes ? this.close(mark, count, opens) : count;
    if (!left) return undefined;
    const node = { is: "text", text: mark.repeat(left), count, both: opens && closes };
    this.nodes.push(node);
    if (opens && (mark !== "~" || left === 2)) this.keepOpen(node);
    return undefined;
  }

  keepOpen(node) {
    if (this.open.length === MAX_OPEN) this.open.shift();
    this.open.push(node);
  }

  // Ends the emphasis that these marks close, and returns how many of them are left.
  close(mark, count, opens) {
    let left = count;
    while (left) {
      const index = this.open.findLastIndex((node) => node.text[0] === mark && pairs(node, count, opens));
      const opener = this.open[index];
      const size = Math.min(2, left, opener?.text.length ?? 0);
      if (!size || (mark === "~" && size < 2)) return left;
      this.open.length = index + 1;
      const inside = this.nodes.splice(this.nodes.lastIndexOf(opener) + 1);
      opener.text = opener.text.slice(size);
      if (!opener.text) {
        this.open.pop();
        this.nodes.pop();
      }
      this.nodes.push({ is: mark === "~" ? "strike" : size === 2 ? "strong" : "em", inside });
      left -= size;
    }
    return left;
  }

  bracket(mark) {
    const node = { is: "text", text: mark };
    this.nodes.push(node);
    this.keepOpen(node);
    this.at += mark.length;
  }

  closeBracket() {
    const index = this.open.findLastIndex((node) => node.text.endsWith("["));
    if (index < 0) return this.plain(1);
    const opener = this.open[index];
    const target = readTarget(this.text, this.at + 1);
    const href = target && safeAddress(target.address);
    // Without an address it stays the text that it is, but its parts are read like any other.
    if (!href) {
      this.open.splice(index, 1);
      return this.plain(1);
    }
    this.open.length = index;
    const picture = opener.text === "![";
    // A link is in no other link.
    if (!picture) this.open = this.open.filter((node) => node.text !== "[");
    const inside = this.nodes.splice(this.nodes.lastIndexOf(opener));
    inside.shift();
    // A picture is not loaded: that would tell its server who reads this. A link leads to it.
    const named = inside.length ? inside : [{ is: "text", text: picture ? "picture" : href }];
    this.nodes.push({ is: "link", href, inside: named, ...(picture ? { picture } : {}) });
    this.at = target.end;
    return undefined;
  }
}

// Marks that could both open and close pair by CommonMark's rule, so that *a**b**c* reads as meant.
function pairs(opener, count, opens) {
  const ambiguous = opener.both || opens;
  return !ambiguous || (opener.count + count) % 3 !== 0 || (opener.count % 3 === 0 && count % 3 === 0);
}

function runLength(text, start) {
  let end = start + 1;
  while (text[end] === text[start]) end += 1;
  return end - start;
}

// Where runs of backticks begin, by their length, the last ones first.
function fencesOf(text) {
  const fences = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!fences.has(run.length)) fences.set(run.length, []);
    fences.get(run.length).push(index);
  }
  for (const starts of fences.values()) starts.reverse();
  return fences;
}

// Reads "(address "title")" and returns the address and where it ends, or null.
function readTarget(text, start) {
  if (text[start] !== "(") return null;
  const limit = Math.min(text.length, start + MAX_ADDRESS);
  let at = skipSpace(text, start + 1, limit);
  const from = at;
  let depth = 0;
  while (at < limit && !/\s/.test(text[at])) {
    if (text[at] === "(" && ++depth > MAX_BRACKETS) return null;
    else if (text[at] === ")" && depth-- === 0) break;
    at += 1;
  }
  const address = text.slice(from, at);
  at = skipSpace(text, at, limit);
  if (text[at] === '"' || text[at] === "'") {
    const end = text.indexOf(text[at], at + 1);
    if (end < 0 || end > limit) return null;
    at = skipSpace(text, end + 1, limit);
  }
  if (at >= limit || text[at] !== ")") return null;
  const angles = address.startsWith("<") && address.endsWith(">");
  return { address: angles ? address.slice(1, -1) : address, end: at + 1 };
}

function skipSpace(text, start, limit) {
  let at = start;
  while (at < limit && /\s/.test(text[at])) at += 1;
  return at;
}

// A sentence's end is not part of an address in it, and neither is a bracket that it is in.
function withoutEnding(address) {
  let end = address.length;
  const surplus = { ")": count(address, ")") - count(address, "("), "]": count(address, "]") - count(address, "[") };
  for (; end; end -= 1) {
    const last = address[end - 1];
    if (surplus[last] > 0) surplus[last] -= 1;
    else if (!/[.,;:!?'*_~]/.test(last)) break;
  }
  return address.slice(0, end);
}

function count(text, character) {
  return text.split(character).length - 1;
}
