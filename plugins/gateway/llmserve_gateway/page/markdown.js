// Reads Markdown, as models write it, into blocks without any HTML:
// { is: "paragraph" | "heading" | "code" | "quote" | "list" | "table" | "rule", … }.
// HTML in a text is text. The texts of blocks are read by inline.js when they are shown.

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?= |$)/;
const TASK = /^\[([ xX])\] /;

// Returns the blocks, each with its source, by which one sees what a longer text has changed.
export function readBlocks(text) {
  return readLines(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function readLines(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (isFence(line)) return readFence(lines, at);
  if (HEADING.test(line)) return [readHeading(line), at + 1];
  if (isRule(line)) return [{ is: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at);
}

function isBlank(line) {
  return line.trim() === "";
}

function isFence(line) {
  const match = FENCE.exec(line);
  return match !== null && !(match[1][0] === "`" && match[2].includes("`"));
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return indentOf(line) < 4 && marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

// What ends a paragraph without a blank line before it.
function interrupts(line) {
  const item = ITEM.exec(line);
  const listed = item && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1) && line.trim() !== item[2];
  return isFence(line) || HEADING.test(line) || isRule(line) || QUOTE.test(line) || Boolean(listed);
}

// An unfinished fence reaches to the end of what there is, as it does while an answer grows.
function readFence(lines, start) {
  const [, fence, info] = FENCE.exec(lines[start]);
  const indent = indentOf(lines[start]);
  let at = start + 1;
  while (at < lines.length && !closes(lines[at], fence)) at += 1;
  const text = lines.slice(start + 1, at).map((line) => dedent(line, indent)).join("\n");
  const language = info.trim().split(/\s/, 1)[0];
  return [{ is: "code", language, text }, Math.min(at + 1, lines.length)];
}

function closes(line, fence) {
  const mark = line.trim();
  return indentOf(line) < 4 && mark.length >= fence.length && mark === fence[0].repeat(mark.length);
}

function readHeading(line) {
  const [start, marks] = HEADING.exec(line);
  let text = line.slice(start.length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  if (end === 0 || (end < text.length && text[end - 1] === " ")) text = text.slice(0, end).trimEnd();
  return { is: "heading", level: marks.length, text };
}

function readQuote(lines, start, depth) {
  let at = start;
  while (at < lines.length && QUOTE.test(lines[at])) at += 1;
  const inside = lines.slice(start, at).map((line) => line.replace(QUOTE, ""));
  return [{ is: "quote", blocks: readLines(inside, depth + 1) }, at];
}

function readList(lines, start, depth) {
  const first = ITEM.exec(lines[start]);
  const kind = first[2].at(-1);
  const list = { is: "list", ordered: /\d/.test(first[2]), start: Number.parseInt(first[2], 10), loose: false, items: [] };
  let at = start;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[2].at(-1) !== kind || isRule(lines[at])) break;
    const [inside, end, loose] = readItem(lines, at, item);
    const task = TASK.exec(inside[0]);
    if (task) inside[0] = inside[0].slice(task[0].length);
    list.items.push({ blocks: readLines(inside, depth + 1), ...(task ? { done: task[1] !== " " } : {}) });
    list.loose ||= loose;
    at = end;
    while (at < lines.length && isBlank(lines[at])) at += 1;
    if (at < lines.length && at > end && ITEM.exec(lines[at])?.[2].at(-1) === kind) list.loose = true;
    else if (at > end) {
      at = end;
      break;
    }
  }
  return [list, at];
}

// Models indent what belongs to an item by two spaces or more, whatever the width of its mark.
function readItem(lines, start, item) {
  const indent = item[1].length;
  const width = indent + item[2].length;
  const rest = lines[start].slice(width);
  const space = rest.length - rest.trimStart().length;
  const offset = width + (space > 4 || !rest.trim() ? 1 : space);
  const inside = [rest.slice(offset - width)];
  let loose = false;
  let at = start + 1;
  let end = at;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    if (isBlank(line)) {
      inside.push("");
      continue;
    }
    const follows = at > end;
    const belongs = indentOf(line) >= Math.min(offset, indent + 2);
    if (!belongs && (follows || interrupts(line) || ITEM.test(line))) break;
    if (follows && !ITEM.test(line)) loose = true;
    inside.push(dedent(line, offset));
    end = at + 1;
  }
  inside.length -= at - end;
  return [inside, end, loose];
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const marks = cellsOf(lines[at + 1]);
  return marks.length === cellsOf(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

function readTable(lines, start) {
  const aligns = cellsOf(lines[start + 1]).map((mark) => {
    const left = mark.startsWith(":");
    const right = mark.endsWith(":");
    return left && right ? "center" : right ? "right" : left ? "left" : "";
  });
  let at = start + 2;
  while (at < lines.length && lines[at].includes("|") && !isFence(lines[at])) at += 1;
  const rows = lines.slice(start + 2, at).map((line) => cellsOf(line).slice(0, aligns.length));
  return [{ is: "table", aligns, head: cellsOf(lines[start]), rows }, at];
}

function cellsOf(line) {
  const cells = [""];
  for (const part of line.trim().matchAll(/\\\||\||[^\\|]+|\\/g)) {
    if (part[0] === "|") cells.push("");
    else cells[cells.length - 1] += part[0] === "\\|" ? "|" : part[0];
  }
  if (cells.length > 1 && !cells[0].trim()) cells.shift();
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

function readParagraph(lines, start) {
  let at = start + 1;
  while (at < lines.length && !isBlank(lines[at]) && !interrupts(lines[at]) && !isTable(lines, at)) at += 1;
  return [{ is: "paragraph", text: lines.slice(start, at).map((line) => line.trim()).join("\n") }, at];
}

// Tabs reach to the next multiple of four columns.
function indentOf(line) {
  let columns = 0;
  for (const character of line) {
    if (character === " ") columns += 1;
    else if (character === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

function dedent(line, columns) {
  let column = 0;
  let at = 0;
  while (column < columns && (line[at] === " " || line[at] === "\t")) {
    column += line[at] === "\t" ? 4 - (column % 4) : 1;
    at += 1;
  }
  return " ".repeat(Math.max(0, column - columns)) + line.slice(at);
}
