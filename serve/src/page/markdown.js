// Markdown as elements. Text only ever becomes text: nothing a model writes is read as HTML, and no
// image or other address is loaded by itself.

import { highlighted } from "./highlight.js";
import { math } from "./math.js";

/// What stands within a line, in the order in which it is looked for.
const KINDS = {
  code: /(?<ticks>`+)(?<code>[^`]|[^`][\s\S]*?[^`])\k<ticks>(?!`)/,
  display: /\$\$(?<dollars>[^$]+)\$\$|\\\[(?<brackets>[\s\S]+?)\\\]/,
  formula: /\\\((?<parens>[\s\S]+?)\\\)|\$(?![\s$])(?<dollar>(?:[^$\n\\]|\\.)*(?:[^\s$\\]|\\[^\s]))\$(?!\d)/,
  escaped: /\\(?<escaped>[!-\/:-@[-`{-~])/,
  bold: /\*\*(?<bold>[\s\S]+?)\*\*|(?<!\w)__(?<under>[^_]+)__(?!\w)/,
  struck: /~~(?<struck>[\s\S]+?)~~/,
  slanted: /\*(?<star>[^*\s](?:[^*]*[^*\s])?)\*|(?<!\w)_(?<line>[^_\s](?:[^_]*[^_\s])?)_(?!\w)/,
  link: /!?\[(?<label>[^\]]*)\]\(\s*<?(?<address>(?:[^()\s<>]|\([^()\s]*\))+)>?(?:\s+"[^"]*")?\s*\)/,
  plain: /(?<plain>https?:\/\/(?:[^\s<>()]|\([^\s<>()]*\))*(?:[^\s<>().,;:!?'"*\]]|\([^\s<>()]*\)))/,
};
const INLINE = new RegExp(Object.values(KINDS).map((k) => k.source).join("|"));

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

/// A link that leads only where a person may want to go, and tells that place nothing.
function link(text, address) {
  if (!/^https?:\/\//i.test(address)) return document.createTextNode(`${text} (${address})`);
  const node = element("a", text || address);
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

function inline(text) {
  const out = [];
  for (;;) {
    const found = INLINE.exec(text);
    if (!found) break;
    if (found.index) out.push(text.slice(0, found.index));
    const g = found.groups;
    const formula = g.parens ?? g.dollar;
    const display = g.dollars ?? g.brackets;
    const bold = g.bold ?? g.under;
    const slanted = g.star ?? g.line;
    if (g.code !== undefined) out.push(element("code", g.code));
    else if (display !== undefined) out.push(math(display, true));
    else if (formula !== undefined) out.push(math(formula, false));
    else if (g.escaped !== undefined) out.push(g.escaped);
    else if (bold !== undefined) out.push(element("strong", ...inline(bold)));
    else if (g.struck !== undefined) out.push(element("del", ...inline(g.struck)));
    else if (slanted !== undefined) out.push(element("em", ...inline(slanted)));
    else if (g.address !== undefined) out.push(link(g.label, g.address));
    else out.push(link(g.plain, g.plain));
    text = text.slice(found.index + found[0].length);
  }
  if (text) out.push(text);
  return out;
}

function code(lines, language) {
  const text = lines.join("\n");
  const copy = element("button", "Copy");
  copy.className = "copy plain";
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(text));
  const body = element("code", ...highlighted(text, language));
  if (language) body.dataset.language = language;
  return element("pre", copy, body);
}

const cells = (row) => row.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim());

/// A row of a table, each cell to the side that the line below the head says.
function tr(kind, row, sides) {
  const made = cells(row).map((c, i) => {
    const cell = element(kind, ...inline(c));
    cell.style.textAlign = sides[i] ?? "left";
    return cell;
  });
  return element("tr", ...made);
}

const side = (rule) => (/^:-*:$/.test(rule) ? "center" : rule.endsWith(":") ? "right" : "left");

/// The formula that begins in the line `at` and takes whole lines, and the line after it.
function formula(lines, at) {
  const opening = /^\s*(\$\$|\\\[)/.exec(lines[at])[1];
  const closing = opening === "$$" ? "$$" : "\\]";
  const begin = lines[at].indexOf(opening) + opening.length;
  let text = "";
  for (let i = at; i < lines.length; i++) {
    const line = i === at ? lines[i].slice(begin) : lines[i];
    const end = line.indexOf(closing);
    if (end >= 0) return line.slice(end + 2).trim() ? null : [math(text + line.slice(0, end), true), i + 1];
    text += `${line}\n`;
  }
  return null;
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;

/// Items from `at` on that are indented by `depth` or more.
function list(lines, at, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(ITEM.exec(lines[at])[2], 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item) {
      // A line that goes on with an item.
      if (!lines[at].trim() || !/^\s/.test(lines[at]) || !node.lastChild) break;
      node.lastChild.append(" ", ...inline(lines[at++].trim()));
    } else if (item[1].length < depth) {
      break;
    } else if (item[1].length > depth + 1 && node.lastChild) {
      const [inner, next] = list(lines, at, item[1].length);
      node.lastChild.append(inner);
      at = next;
    } else {
      node.append(element("li", ...inline(item[3])));
      at++;
    }
  }
  return [node, at];
}

/// The elements of a text.
export function markdown(text) {
  const lines = text.split("\n");
  const out = document.createDocumentFragment();
  let at = 0;
  let made;
  while (at < lines.length) {
    const line = lines[at];
    const fence = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (fence) {
      const body = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) body.push(lines[at]);
      at++;
      out.append(code(body, fence[2]));
    } else if (!line.trim()) {
      at++;
    } else if (/^\s*(\$\$|\\\[)/.test(line) && (made = formula(lines, at))) {
      out.append(made[0]);
      at = made[1];
    } else if (heading) {
      out.append(element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
      at++;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      out.append(element("hr"));
      at++;
    } else if (/^\s*>/.test(line)) {
      const body = [];
      for (; at < lines.length && /^\s*>/.test(lines[at]); at++) body.push(lines[at].replace(/^\s*>\s?/, ""));
      out.append(element("blockquote", markdown(body.join("\n"))));
    } else if (ITEM.test(line)) {
      const [node, next] = list(lines, at, ITEM.exec(line)[1].length);
      out.append(node);
      at = next;
    } else if (line.includes("|") && /^[\s|:-]+$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      const sides = cells(lines[at + 1]).map(side);
      const table = element("table", element("thead", tr("th", line, sides)));
      const body = element("tbody");
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) body.append(tr("td", lines[at], sides));
      table.append(body);
      out.append(table);
    } else {
      const body = [];
      const ends = (l) => !l.trim() || /^\s*(`{3,}|~{3,}|>|#{1,6}\s|\$\$|\\\[)/.test(l) || ITEM.test(l);
      do body.push(lines[at++]);
      while (at < lines.length && !ends(lines[at]));
      const paragraph = element("p");
      body.forEach((l, i) => paragraph.append(...(i ? [element("br")] : []), ...inline(l)));
      out.append(paragraph);
    }
  }
  return out;
}
