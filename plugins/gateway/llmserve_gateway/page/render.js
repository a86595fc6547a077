// Shows Markdown as elements, each made by its name here and none by the text. A text that grows
// keeps the elements of the blocks that have not changed.
import { copyButton, create } from "./dom.js";
import { readBlocks, safeAddress } from "./markdown.js";

// The page has headings of its own, up to the third level, above those of a text.
const HEADING_OFFSET = 3;
// Elements within elements, beyond which browsers need minutes to lay them out.
const MAX_DEPTH = 100;
const TASK = /^\[([ xX])\] /;
const SIDES = /text-align:(left|center|right)/;

// The text of an answer, in an element of its own.
export class MarkdownView {
  constructor() {
    this.element = create("div", { className: "markdown" });
    this.sources = [];
  }

  show(text) {
    const blocks = readBlocks(text);
    const sources = blocks.map((block) => block.source);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.element.children.length > same) this.element.lastElementChild.remove();
    this.element.append(...blocks.slice(same).flatMap((block) => render(block.tokens)));
    this.sources = sources;
  }
}

// Returns the nodes of tokens, of which those that open and close an element are around its content.
function render(tokens, inLink = false) {
  const root = [];
  const open = [{ nodes: root }];
  for (const token of tokens) {
    if (token.nesting > 0) {
      const isTooDeep = open.length > MAX_DEPTH;
      open.push({ token, nodes: isTooDeep ? open.at(-1).nodes : [], inLink, isTooDeep });
      inLink ||= token.type === "link_open";
    } else if (token.nesting < 0) {
      const { token: opened, nodes, inLink: before, isTooDeep } = open.pop();
      inLink = before;
      if (!isTooDeep) open.at(-1).nodes.push(...renderAround(opened, nodes, inLink));
    } else {
      open.at(-1).nodes.push(...renderAlone(token, inLink));
    }
  }
  return root;
}

function renderAround(token, nodes, inLink) {
  switch (token.type) {
    case "paragraph_open": return token.hidden ? nodes : [create("p", { dir: "auto" }, ...nodes)];
    case "heading_open": return [create(`h${Math.min(6, Number(token.tag[1]) + HEADING_OFFSET)}`, { dir: "auto" }, ...nodes)];
    case "blockquote_open": return [create("blockquote", {}, ...nodes)];
    case "bullet_list_open": return [create("ul", {}, ...nodes)];
    case "ordered_list_open": return [create("ol", { start: token.attrGet("start") }, ...nodes)];
    case "list_item_open": return [renderItem(nodes)];
    case "table_open": return [renderTable(nodes)];
    case "thead_open": case "tbody_open": case "tr_open": return [create(token.tag, {}, ...nodes)];
    case "th_open": case "td_open": return [renderCell(token, nodes)];
    case "strong_open": case "em_open": case "s_open": return [create(token.tag, {}, ...nodes)];
    case "link_open": return inLink ? nodes : renderLink(token.attrGet("href"), nodes);
    default: return nodes;
  }
}

function renderAlone(token, inLink) {
  switch (token.type) {
    case "inline": return render(token.children);
    case "fence": return [renderCode(token.info.trim().split(/\s/, 1)[0], token.content.replace(/\n$/, ""))];
    case "hr": return [create("hr")];
    case "code_inline": return [create("code", {}, token.content)];
    case "softbreak": case "hardbreak": return [create("br")];
    case "image": return renderPicture(token, inLink);
    default: return token.content ? [token.content] : [];
  }
}

function renderCode(language, text) {
  const bar = create("figcaption", {}, create("span", {}, language || "text"), copyButton(() => text));
  const code = create("pre", { tabIndex: 0 }, create("code", {}, text));
  return create("figure", { className: "code" }, bar, code);
}

function renderItem(nodes) {
  const item = create("li", { dir: "auto" });
  const holder = nodes[0] instanceof HTMLParagraphElement ? nodes[0].firstChild : nodes[0];
  const first = typeof holder === "string" ? holder : holder instanceof Text ? holder.data : "";
  const task = TASK.exec(first);
  if (task) {
    const done = task[1] !== " ";
    const box = create("input", { type: "checkbox", checked: done, disabled: true, "aria-label": done ? "done" : "not done" });
    item.className = "task";
    item.append(box, " ");
    if (typeof holder === "string") nodes[0] = holder.slice(task[0].length);
    else holder.data = holder.data.slice(task[0].length);
  }
  item.append(...nodes);
  return item;
}

function renderTable(nodes) {
  const table = create("table", {}, ...nodes);
  return create("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
}

function renderCell(token, nodes) {
  const side = SIDES.exec(token.attrGet("style") ?? "");
  return create(token.tag, { dir: "auto", className: side ? `to-${side[1]}` : null }, ...nodes);
}

// Its address shows before one follows it, and the other side learns nothing of this page.
function renderLink(address, nodes) {
  const href = safeAddress(address);
  if (href === null) return nodes;
  return [create("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...(nodes.length ? nodes : [href]))];
}

// A picture is not loaded: that would tell its server who reads this. A link leads to it.
function renderPicture(token, inLink) {
  const named = render(token.children, true);
  const nodes = ["picture: ", ...(named.length ? named : ["picture"])];
  return inLink ? nodes : renderLink(token.attrGet("src"), nodes);
}
