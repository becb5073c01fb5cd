// Conversations, kept in this browser alone. Each is a tree: an edited message or an answer made
// again stands beside the former one, and `head` says which branch is shown.

const PLACE = "nq.conversations";
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

export const settings = read("localStorage", SETTINGS, { thinking: true });
// Unless it is to be remembered, the key lives as long as its tab.
settings.key = read("sessionStorage", KEY, settings.key);
export const conversations = read("localStorage", PLACE, []);

/// False if the browser has no more room.
export function save() {
  try {
    localStorage.setItem(PLACE, JSON.stringify(conversations.filter((c) => Object.keys(c.nodes).length)));
    sessionStorage.setItem(KEY, JSON.stringify(settings.key ?? ""));
    const kept = { ...settings, key: settings.remember ? settings.key : undefined };
    localStorage.setItem(SETTINGS, JSON.stringify(kept));
    return true;
  } catch {
    return false;
  }
}

const name = () => Math.random().toString(36).slice(2, 10);

export function create() {
  const conversation = { id: name(), title: "", nodes: {}, head: null };
  conversations.unshift(conversation);
  return conversation;
}

export function remove(id) {
  const at = conversations.findIndex((c) => c.id === id);
  if (at >= 0) conversations.splice(at, 1);
}

/// Adds a message behind `parent` (null: at the beginning) and shows it.
export function add(conversation, parent, role, content) {
  const node = { id: name(), parent, role, content, made: Date.now() };
  conversation.nodes[node.id] = node;
  conversation.head = node.id;
  if (role === "user" && !conversation.title) conversation.title = content.slice(0, 60);
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
