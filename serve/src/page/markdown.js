// Markdown as elements. Text only ever becomes text: nothing a model writes is read as HTML, and no
// image or other address is loaded by itself.

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([\s\S]+?)\*\*|~~([\s\S]+?)~~|\*([^*\s](?:[^*]*[^*\s])?)\*|!?\[([^\]]*)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()\]]+[^\s<>()\].,;:!?'"])/;

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
    const [all, , code, bold, struck, slanted, label, address, plain] = found;
    if (code !== undefined) out.push(element("code", code));
    else if (bold !== undefined) out.push(element("strong", ...inline(bold)));
    else if (struck !== undefined) out.push(element("del", ...inline(struck)));
    else if (slanted !== undefined) out.push(element("em", ...inline(slanted)));
    else if (address !== undefined) out.push(link(label, address));
    else out.push(link(plain, plain));
    text = text.slice(found.index + all.length);
  }
  if (text) out.push(text);
  return out;
}

function code(lines, language) {
  const text = lines.join("\n");
  const copy = element("button", "copy");
  copy.className = "copy plain";
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(text));
  const body = element("code", text);
  if (language) body.dataset.language = language;
  return element("pre", copy, body);
}

const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|").map((c) => c.trim());
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
      const head = element("tr", ...cells(line).map((c) => element("th", ...inline(c))));
      const table = element("table", element("thead", head));
      const body = element("tbody");
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) {
        body.append(element("tr", ...cells(lines[at]).map((c) => element("td", ...inline(c)))));
      }
      table.append(body);
      out.append(table);
    } else {
      const body = [];
      const ends = (l) => !l.trim() || /^\s*(`{3,}|~{3,}|>|#{1,6}\s)/.test(l) || ITEM.test(l);
      do body.push(lines[at++]);
      while (at < lines.length && !ends(lines[at]));
      const paragraph = element("p");
      body.forEach((l, i) => paragraph.append(...(i ? [element("br")] : []), ...inline(l)));
      out.append(paragraph);
    }
  }
  return out;
}
