// Conversations, kept in this browser alone, each under a key of its own: tabs write only what they
// changed and take over what others wrote. A conversation is a tree: an edited message or an answer made
// again stands beside the former one, and `head` says which branch is shown.

const PLACE = "nq.conversation.";
const SETTINGS = "nq.settings";
const KEY = "nq.key";

// A browser that keeps nothing for pages throws at their very names.
const read = (store, place, otherwise) => {
  try {
    return JSON.parse(window[store].getItem(place)) ?? otherwise;
  } catch {
    return otherwise;
  }
};

const write = (store, place, value) => {
  try {
    if (value === undefined) window[store].removeItem(place);
    else window[store].setItem(place, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
};

const places = () => {
  try {
    return Object.keys(localStorage).filter((place) => place.startsWith(PLACE));
  } catch {
    return [];
  }
};

export const settings = read("localStorage", SETTINGS, { thinking: true });
// Unless it is to be remembered, the key lives as long as its tab.
settings.key = read("sessionStorage", KEY, settings.key);
export const conversations = places().map((place) => read("localStorage", place, null)).filter((c) => c?.nodes);
const sort = () => conversations.sort((a, b) => (b.changed ?? 0) - (a.changed ?? 0));
sort();

/// False if the browser has no more room.
export function saveSettings() {
  const kept = write("sessionStorage", KEY, settings.key ?? "");
  return write("localStorage", SETTINGS, { ...settings, key: settings.remember ? settings.key : undefined }) && kept;
}

/// Takes over what another tab has made of a conversation.
function merge(conversation, other) {
  conversation.gone = [...new Set([...(conversation.gone ?? []), ...(other.gone ?? [])])];
  for (const node of Object.values(other.nodes)) {
    const mine = conversation.nodes[node.id];
    if (!mine || (node.changed ?? 0) > (mine.changed ?? 0)) conversation.nodes[node.id] = node;
  }
  if ((other.changed ?? 0) > (conversation.changed ?? 0)) {
    conversation.title = other.title;
    conversation.own = other.own;
    conversation.changed = other.changed;
  }
  // What was deleted in one tab is still in the other.
  for (const id of conversation.gone) delete conversation.nodes[id];
  if (!conversation.nodes[conversation.head]) conversation.head = newest(conversation, Object.values(conversation.nodes))?.id ?? null;
}

/// The message of the list that was made last and has nothing behind it.
function newest(conversation, list) {
  const parents = new Set(Object.values(conversation.nodes).map((n) => n.parent));
  return list.filter((n) => !parents.has(n.id)).sort((a, b) => b.made - a.made)[0];
}

/// Deletes a message and all that follows it; another version of it is shown, or what was before it.
export function drop(conversation, node) {
  const gone = new Set([node.id]);
  const nodes = Object.values(conversation.nodes);
  for (let size = 0; size < gone.size; ) {
    size = gone.size;
    for (const n of nodes) if (gone.has(n.parent)) gone.add(n.id);
  }
  for (const id of gone) delete conversation.nodes[id];
  conversation.gone = [...(conversation.gone ?? []), ...gone];
  const beside = siblings(conversation, node).at(-1);
  if (beside) show(conversation, beside);
  else conversation.head = node.parent;
}

/// Keeps a conversation, with the messages that other tabs have added to it; false if the browser has no
/// more room. An empty one is not kept.
export function save(conversation) {
  if (!conversation.head && !conversation.gone?.length) return true;
  const stored = read("localStorage", PLACE + conversation.id, null);
  if (stored?.nodes) merge(conversation, stored);
  return write("localStorage", PLACE + conversation.id, conversation);
}

/// Notes that a conversation and one of its messages have changed.
export function touch(conversation, node) {
  conversation.changed = Date.now();
  if (node) node.changed = conversation.changed;
  sort();
}

/// Calls `changed` with the id of each conversation that another tab changes, or with null for settings.
export function watch(changed) {
  window.addEventListener("storage", (event) => {
    if (event.key === SETTINGS) {
      const { key } = settings;
      Object.assign(settings, read("localStorage", SETTINGS, {}));
      settings.key ??= key;
      changed(null);
    }
    if (!event.key?.startsWith(PLACE)) return;
    const id = event.key.slice(PLACE.length);
    const mine = conversations.find((c) => c.id === id);
    const other = read("localStorage", event.key, null);
    if (!other?.nodes) {
      forget(id);
    } else if (!mine) {
      conversations.push(other);
    } else {
      merge(mine, other);
      // What was asked there continues what is shown here.
      if (path(other).some((node) => node.id === mine.head)) mine.head = other.head;
    }
    sort();
    changed(id);
  });
}

const name = () => Math.random().toString(36).slice(2, 10);

export function create() {
  const conversation = { id: name(), title: "", nodes: {}, head: null, changed: Date.now() };
  conversations.unshift(conversation);
  return conversation;
}

function forget(id) {
  const at = conversations.findIndex((c) => c.id === id);
  if (at >= 0) conversations.splice(at, 1);
}

export function remove(id) {
  forget(id);
  write("localStorage", PLACE + id, undefined);
}

/// Adds a message behind `parent` (null: at the beginning) and shows it; its images are data: URLs.
export function add(conversation, parent, role, content, images = []) {
  const node = { id: name(), parent, role, content, made: Date.now() };
  if (images.length) node.images = images;
  conversation.nodes[node.id] = node;
  conversation.head = node.id;
  if (role === "user" && !conversation.title) conversation.title = (content || "Image").slice(0, 60);
  touch(conversation, node);
  return node;
}

/// The messages from the beginning to `id`.
export function path(conversation, id = conversation.head) {
  const found = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) found.unshift(node);
  return found;
}

/// Messages with the same parent, in the order in which they were made.
export function siblings(conversation, node) {
  const all = Object.values(conversation.nodes).filter((n) => n.parent === node.parent);
  return all.sort((a, b) => a.made - b.made);
}

/// Shows the branch of `node`, as far as it goes.
export function show(conversation, node) {
  for (;;) {
    const children = Object.values(conversation.nodes).filter((n) => n.parent === node.id);
    if (!children.length) break;
    node = children.sort((a, b) => b.made - a.made)[0];
  }
  conversation.head = node.id;
}

/// What a message says, as OpenAI's API has it: its text, or its images and its text.
export function said({ content, images }) {
  if (!images?.length) return content;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
}

/// A conversation as it is in a file, which `/load` of `nq chat` reads too.
export function exported(conversation, model) {
  const messages = path(conversation).map((message) => ({ role: message.role, content: said(message) }));
  const { title, nodes, head, own } = conversation;
  return { model, title, messages, nodes, head, own };
}

/// The shown branch of a conversation as Markdown.
export function asMarkdown(conversation) {
  const parts = path(conversation).map(({ role, content, images = [] }) => {
    const shown = images.map((url) => `![](${url})\n\n`).join("");
    return `## ${role === "user" ? "User" : "Assistant"}\n\n${shown}${content}\n`;
  });
  return [`# ${conversation.title}\n`, ...parts].join("\n");
}

/// The conversations of a file: those that were exported here, or one that `nq chat` saved.
export function imported(text, file) {
  const read = JSON.parse(text);
  const all = Array.isArray(read?.chats) ? read.chats : [read];
  if (!all.length) throw new Error(`${file}: there is no chat in it`);
  return all.map((one) => conversationOf(one, file));
}

/// A message of a file with its text and its images apart.
function taken(message) {
  if (!Array.isArray(message?.content)) return message;
  const texts = message.content.filter((part) => part?.type === "text").map((part) => part.text);
  const images = message.content.filter((part) => part?.type === "image_url").map((part) => part.image_url?.url);
  return { role: message.role, content: texts.join("\n"), images };
}

function conversationOf(read, file) {
  const refuse = () => {
    throw new Error(`${file}: expected a conversation that was exported here or saved by nq chat`);
  };
  const isImage = (url) => typeof url === "string" && url.startsWith("data:image/");
  const plain = (m) =>
    ["user", "assistant"].includes(m?.role) && typeof m.content === "string" && (m.images ?? []).every(isImage);
  const conversation = { id: name(), title: String(read?.title ?? "").slice(0, 60), nodes: {}, head: null };
  const own = Object.entries(read?.own ?? {}).filter(([, value]) => typeof value === "string");
  if (own.length) conversation.own = Object.fromEntries(own);
  const nodes = Object.values(read?.nodes ?? {});
  if (nodes.length) {
    // Messages get new ids; each must follow one before it.
    const ids = new Map([[null, null]]);
    let rest = nodes;
    while (rest.length) {
      const ready = rest.filter((n) => plain(n) && ids.has(n.parent) && !ids.has(n.id));
      if (!ready.length) refuse();
      for (const { id, parent, role, content, images, made } of ready) {
        const node = { id: name(), parent: ids.get(parent), role, content, images, made: Number(made) || 0 };
        conversation.nodes[node.id] = node;
        ids.set(id, node.id);
      }
      rest = rest.filter((n) => !ready.includes(n));
    }
    show(conversation, conversation.nodes[ids.get(read.head)] ?? Object.values(conversation.nodes)[0]);
  } else {
    // A saved chat may begin with its system prompt, which is a setting here.
    const list = Array.isArray(read) ? read : read?.messages;
    const messages = Array.isArray(list) ? list.filter((m) => m?.role !== "system").map(taken) : [];
    if (!messages.length || !messages.every(plain)) refuse();
    for (const { role, content, images } of messages) add(conversation, conversation.head, role, content, images);
  }
  conversation.title ||= (path(conversation)[0].content || "Image").slice(0, 60);
  conversations.unshift(conversation);
  touch(conversation);
  return conversation;
}
