// Markdown as elements, from what marked reads. Text only ever becomes text: nothing a model writes is read as HTML,
// and no image or other address is loaded by itself.

import { highlighted } from "./highlight.js";
import { Marked } from "./marked.js";
import { math } from "./math.js";

/// Characters of a block of code that is coloured while it is being written.
const COLOURED = 20000;

/// A formula as marked reads it, beside Markdown's own marks. `start` says where one may begin.
function formula(name, level, pattern, start) {
  const tokenizer = (source) => {
    const found = pattern.exec(source);
    return found ? { type: name, raw: found[0], text: found.slice(1).find((t) => t !== undefined) } : undefined;
  };
  return { name, level, start, tokenizer };
}

const within = (source) => {
  const at = source.search(/\$|\\[([]/);
  return at < 0 ? undefined : at;
};

/// Where a formula of whole lines interrupts the paragraph that the source begins with.
const below = (source) => {
  const end = source.search(/\n[ \t]*\n/);
  const at = (end < 0 ? source : source.slice(0, end)).search(/\n {0,3}(?:\$\$[^$]+\$\$|\\\[[^]+?\\\])[ \t]*(?:\n|$)/);
  return at < 0 ? undefined : at + 1;
};

const reader = new Marked({
  gfm: true,
  breaks: true,
  extensions: [
    formula("display", "block", /^ {0,3}(?:\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/, below),
    formula("inlineDisplay", "inline", /^(?:\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\])/, within),
    formula("formula", "inline", /^(?:\\\(([\s\S]+?)\\\)|\$(?![\s$])((?:[^$\n\\]|\\.)*?(?:[^\s$\\]|\\[^\s]))\$(?!\d))/, within),
  ],
  tokenizer: {
    // HTML is text, but for line ends.
    html: () => undefined,
    tag: (source) => {
      const found = /^<br\s*\/?>/i.exec(source);
      return found ? { type: "br", raw: found[0] } : undefined;
    },
  },
});

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

/// A link that leads only where a person may want to go, and tells that place nothing.
function link(children, address) {
  if (!/^https?:\/\//i.test(address)) return [...children, ` (${address})`];
  const node = element("a", ...children);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return [node];
}

const INLINE = {
  strong: (t) => [element("strong", ...inline(t.tokens))],
  em: (t) => [element("em", ...inline(t.tokens))],
  del: (t) => [element("del", ...inline(t.tokens))],
  codespan: (t) => [element("code", t.text)],
  br: () => [element("br")],
  link: (t) => (t.raw === t.href || t.raw === `<${t.href}>` ? link([t.text], t.href) : link(inline(t.tokens), t.href)),
  image: (t) => link([t.text || t.href], t.href),
  formula: (t) => [math(t.text, false)],
  inlineDisplay: (t) => [math(t.text, true)],
  checkbox: (t) => [checkbox(t)],
};

function inline(tokens) {
  return (tokens ?? []).flatMap((t) => INLINE[t.type]?.(t) ?? (t.tokens ? inline(t.tokens) : [t.text ?? t.raw]));
}

function checkbox({ checked }) {
  const box = element("input");
  Object.assign(box, { type: "checkbox", disabled: true, checked: Boolean(checked) });
  return box;
}

function code(text, language, live) {
  const copy = element("button", "Copy");
  copy.className = "copy plain";
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(text));
  const plain = live && text.length > COLOURED;
  const body = element("code", ...(plain ? [text] : highlighted(text, language)));
  if (language) body.dataset.language = language;
  return element("pre", copy, body);
}

/// A row of a table, each cell to the side that the line below the head says.
function tr(kind, cells) {
  const made = cells.map(({ tokens, align }) => {
    const cell = element(kind, ...inline(tokens));
    cell.style.textAlign = align ?? "left";
    return cell;
  });
  return element("tr", ...made);
}

function list(t, live) {
  const node = element(t.ordered ? "ol" : "ul", ...t.items.map((item) => element("li", ...blocks(item.tokens, live))));
  if (t.ordered) node.start = t.start;
  return node;
}

const BLOCKS = {
  space: () => [],
  def: () => [],
  heading: (t) => [element(`h${Math.min(6, t.depth + 2)}`, ...inline(t.tokens))],
  paragraph: (t) => [element("p", ...inline(t.tokens))],
  text: (t) => (t.tokens ? inline(t.tokens) : [t.text]),
  code: (t, live) => [code(t.text, /^[\w+#.-]*/.exec(t.lang ?? "")[0], live)],
  blockquote: (t, live) => [element("blockquote", ...blocks(t.tokens, live))],
  list: (t, live) => [list(t, live)],
  hr: () => [element("hr")],
  display: (t) => [math(t.text, true)],
  table: (t) => {
    const body = element("tbody", ...t.rows.map((row) => tr("td", row)));
    return [element("table", element("thead", tr("th", t.header)), body)];
  },
};

/// The elements of blocks; `live`: more may come.
function blocks(tokens, live) {
  return tokens.flatMap((t) => BLOCKS[t.type]?.(t, live) ?? inline([t]));
}

/// What marked reads in a text; a text that it cannot read, such as quotes within ten thousand quotes, stays one.
function read(text) {
  try {
    const tokens = reader.lexer(text);
    return tokens.map((t) => t.raw).join("") === text ? tokens : [{ type: "text", raw: text, text }];
  } catch {
    return [{ type: "text", raw: text, text }];
  }
}

/// Tabs and line ends as marked has them in what it reads.
const normal = (text) => text.replace(/\r\n?/g, "\n");

/// An element that shows a text which grows. Blocks that have ended are made once: only the last ones may change with
/// what comes behind them. The last but one does so where what follows it turns out to be a part of it: the `2` of an
/// item is a paragraph until its point comes.
export class Written {
  constructor(element) {
    this.element = element;
    this.forget();
  }

  forget() {
    this.done = "";
    this.last = [];
    this.element.replaceChildren();
  }

  /// Shows `text`; `live`: more may come.
  show(text, live) {
    text = normal(text);
    if (!text.startsWith(this.done)) this.forget();
    for (const node of this.last) node.remove();
    const tokens = read(text.slice(this.done.length));
    const written = tokens.flatMap((t, i) => (t.type === "space" ? [] : [i]));
    const before = tokens.slice(0, written.at(-2) ?? 0);
    this.element.append(...blocks(before, false));
    this.done += before.map((t) => t.raw).join("");
    this.last = blocks(tokens.slice(before.length), live).map((node) =>
      typeof node === "string" ? document.createTextNode(node) : node,
    );
    this.element.append(...this.last);
  }
}
