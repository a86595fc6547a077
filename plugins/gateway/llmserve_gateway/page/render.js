// Shows Markdown as elements, each made by its name here and none by the text. A text that grows
// keeps the elements of the blocks that have not changed.
import { copyButton, create } from "./dom.js";
import { readInline } from "./inline.js";
import { readBlocks } from "./markdown.js";

const INLINE = { strong: "strong", em: "em", strike: "s" };
// The page has headings of its own, up to the third level, above those of a text.
const HEADING_OFFSET = 3;

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
    this.element.append(...blocks.slice(same).map(renderBlock));
    this.sources = sources;
  }
}

function renderBlock(block) {
  switch (block.is) {
    case "heading": return create(`h${Math.min(6, block.level + HEADING_OFFSET)}`, { dir: "auto" }, ...inline(block.text));
    case "code": return renderCode(block);
    case "quote": return create("blockquote", {}, ...block.blocks.map(renderBlock));
    case "list": return renderList(block);
    case "table": return renderTable(block);
    case "rule": return create("hr");
    default: return create("p", { dir: "auto" }, ...inline(block.text));
  }
}

function renderCode({ language, text }) {
  const bar = create("figcaption", {}, create("span", {}, language || "text"), copyButton(() => text));
  const code = create("pre", { tabIndex: 0 }, create("code", {}, text));
  return create("figure", { className: "code" }, bar, code);
}

function renderList({ ordered, start, loose, items }) {
  const list = create(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {});
  for (const { blocks, done } of items) {
    const item = create("li", { dir: "auto" });
    if (done !== undefined) {
      item.className = "task";
      item.append(create("input", { type: "checkbox", checked: done, disabled: true, "aria-label": done ? "done" : "not done" }), " ");
    }
    for (const block of blocks) {
      if (!loose && block.is === "paragraph") item.append(...inline(block.text));
      else item.append(renderBlock(block));
    }
    list.append(item);
  }
  return list;
}

function renderTable({ aligns, head, rows }) {
  const cells = (name, texts) => create("tr", {}, ...texts.map((text, index) =>
    create(name, { dir: "auto", className: aligns[index] ? `to-${aligns[index]}` : null }, ...inline(text))));
  const table = create("table", {}, create("thead", {}, cells("th", head)), create("tbody", {}, ...rows.map((row) => cells("td", row))));
  return create("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
}

function inline(text) {
  return renderInline(readInline(text), false);
}

function renderInline(nodes, linked) {
  return nodes.flatMap((node) => {
    if (node.is === "break") return [create("br")];
    if (node.is === "code") return [create("code", {}, node.text)];
    if (node.is === "link") return linked ? renderInline(node.inside, true) : [renderLink(node)];
    if (node.inside) return [create(INLINE[node.is], {}, ...renderInline(node.inside, linked))];
    return [node.text];
  });
}

// Its address shows before one follows it, and the other side learns nothing of this page.
function renderLink({ href, inside, picture }) {
  const text = renderInline(inside, true);
  return create("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...(picture ? ["picture: "] : []), ...text);
}
