// The page: what is shown, and what goes to the server and comes back.

import { Written } from "./markdown.js";
import {
  add, asMarkdown, conversations, create, drop, exported, imported, path, remove, said, save, saveSettings, settings,
  show, siblings, touch, watch,
} from "./store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed", "max_tokens",
  "thinking_budget",
];
/// What a chat may have of its own.
const OWN = ["system", ...NUMBERS, "more"];
const SETTINGS = [...OWN, "thinking", "theme", "key", "remember"];
/// Pixels of the longer side, and characters as a data: URL, of an image that is kept as it is: browsers have little room
/// for a page.
const LARGE_SIDE = 2048;
const LARGE_URL = 1_000_000;
/// Milliseconds between two times that an answer under way is kept.
const KEEPING = 1000;

let current = conversations[0] ?? create();
/// The models of the server, as it lists them.
let served = [];
/// The images of the next message, as data: URLs.
let attached = [];
/// What ends the answer under way, by the id of its conversation.
const running = new Map();

function node(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function note(text, error = false) {
  $("note").textContent = text;
  $("note").classList.toggle("error", error);
}

/// Keeps a conversation, unless it was deleted.
function keep(conversation) {
  if (conversations.includes(conversation) && !save(conversation)) note("This browser has no room left: delete a conversation.", true);
}

function headers() {
  const all = { "content-type": "application/json" };
  if (settings.key) all.authorization = `Bearer ${settings.key}`;
  return all;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const wait = response.headers.get("retry-after");
  const later = wait ? ` (try again in ${wait} s)` : "";
  return new Error((body?.error?.message ?? `the server says ${response.status}`) + later);
}

/// A request to the server; browsers word a server that is gone in their own ways.
async function call(path, options) {
  try {
    return await fetch(path, { headers: headers(), ...options });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new Error("The server does not answer. Is nq serve still running?");
  }
}

/// The pieces of an event stream's data.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read().catch((e) => {
      if (e.name === "AbortError") throw e;
      return { done: true };
    });
    if (done) throw new Error("The connection to the server was lost.");
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

/// A setting of the chat or, if it has none of its own, of all; undefined if there is none.
function setting(name) {
  const own = current.own?.[name];
  const value = own === undefined || own === "" ? settings[name] : own;
  return value === "" ? undefined : value;
}

/// The request for an answer to messages; `continued`: the answer that is to go on.
function request(messages, continued) {
  const body = {
    model: $("model").value || undefined,
    messages: messages.map((message) => ({ role: message.role, content: said(message) })),
    stream: true,
    stream_options: { include_usage: true },
    chat_template_kwargs: settings.thinking ? undefined : { enable_thinking: false },
  };
  if (continued) {
    if (continued.reasoning) body.messages.at(-1).reasoning_content = continued.reasoning;
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  if (setting("system")) body.messages.unshift({ role: "system", content: setting("system") });
  for (const name of NUMBERS) {
    if (setting(name) !== undefined) body[name] = Number(setting(name));
  }
  return Object.assign(body, setting("more") ? JSON.parse(setting("more")) : {});
}

/// Answers the message `parent`, beside answers that it may have, or goes on with the answer `continued`.
async function answer(parent, continued) {
  const conversation = current;
  const messages = path(conversation, (continued ?? parent).id);
  const made = continued ?? add(conversation, parent.id, "assistant", "");
  made.reasoning ??= "";
  for (const name of ["cut", "error", "usage"]) delete made[name];
  // Until it is complete: should the page be left, this much is kept.
  made.stopped = true;
  const stop = new AbortController();
  running.set(conversation.id, stop);
  keep(conversation);
  render();
  const begun = performance.now();
  const since = () => (performance.now() - begun) / 1000;
  let kept = begun;
  try {
    const body = JSON.stringify(request(messages, continued));
    const response = await call("v1/chat/completions", { method: "POST", body, signal: stop.signal });
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) made.wait ??= since();
      if (delta.content) made.thought ??= since();
      made.reasoning += delta.reasoning_content ?? "";
      made.content += delta.content ?? "";
      if (event.choices?.[0]?.finish_reason === "length") made.cut = true;
      if (event.usage) made.usage = event.usage;
      if (performance.now() - kept > KEEPING) {
        kept = performance.now();
        touch(conversation, made);
        keep(conversation);
      }
      update(made);
    }
    made.stopped = false;
    note("");
  } catch (e) {
    if (e.name !== "AbortError") {
      made.stopped = false;
      made.error = e.message;
    }
  }
  made.seconds = since();
  running.delete(conversation.id);
  touch(conversation, made);
  keep(conversation);
  if (conversation === current) render();
  else list();
}

function ask(text) {
  if (running.has(current.id) || !(text.trim() || attached.length)) return;
  const images = attached;
  attached = [];
  attachments();
  answer(add(current, current.head, "user", text.trim(), images));
}

const sees = () => served.find((m) => m.id === $("model").value)?.input_modalities?.includes("image") ?? false;

/// The images of the next message, each with what takes it away.
function attachments() {
  $("attach").hidden = !sees();
  $("images").replaceChildren(...attached.flatMap((src, i) => [
    node("img", { src, alt: `Image ${i + 1}` }),
    button("×", `Remove image ${i + 1}`, () => {
      attached.splice(i, 1);
      attachments();
    }),
  ]));
}

const asUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve(reader.result));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(file);
});

/// An image as a data: URL; a large one is made smaller.
async function imageUrl(file) {
  const url = await asUrl(file);
  const image = new Image();
  image.src = url;
  await image.decode();
  const { naturalWidth: width, naturalHeight: height } = image;
  const scale = Math.min(1, LARGE_SIDE / Math.max(width, height));
  if (scale === 1 && url.length <= LARGE_URL) return url;
  const canvas = node("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/// Attaches the images among files to the next message.
async function attach(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return;
  if (!sees()) return note(`${$("model").value} reads text alone.`, true);
  for (const file of images) {
    try {
      attached.push(await imageUrl(file));
      note("");
    } catch {
      note(`${file.name}: this browser cannot read the image.`, true);
    }
  }
  attachments();
}

function button(text, title, action) {
  const made = node("button", { type: "button", className: "plain", title }, text);
  made.setAttribute("aria-label", title);
  made.addEventListener("click", action);
  return made;
}

/// Tokens per second are shown only if they came over this many seconds: text arrives in portions.
const LEAST_SECONDS = 1;

function figures(message) {
  const all = [];
  if (message.usage) {
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = message.usage;
    const streamed = message.seconds - message.wait;
    if (streamed >= LEAST_SECONDS) all.push(`${((tokens - 1) / streamed).toFixed(1)} tok/s`);
    all.push(`${tokens} tokens in ${message.seconds.toFixed(1)} s`);
    if (message.wait) all.push(`first after ${message.wait.toFixed(2)} s`);
    all.push(`${details?.cached_tokens ?? 0} of ${prompt} prompt tokens from the cache`);
  }
  if (message.cut) all.push("length limit reached");
  if (message.stopped) all.push("stopped");
  return all.join(" · ");
}

/// What stands below a message: branches, what can be done, figures.
function foot(message) {
  const row = node("div", { className: "foot" });
  const all = siblings(current, message);
  const at = all.indexOf(message);
  const to = (i) => () => {
    show(current, all[i]);
    keep(current);
    render();
  };
  if (all.length > 1) {
    const before = button("‹", "Previous version", to(at - 1));
    const after = button("›", "Next version", to(at + 1));
    before.disabled = at === 0;
    after.disabled = at === all.length - 1;
    row.append(before, `${at + 1} / ${all.length}`, after);
  }
  const busy = running.has(current.id);
  if (!busy && message.role === "user") {
    row.append(button("Edit", "Edit message", () => edit(message)));
    if (message.id === current.head) row.append(button("Answer", "Answer this message", () => answer(message)));
  } else if (!busy && message.parent) {
    const ended = message.id === current.head && message.content && (message.cut || message.stopped || message.error);
    if (ended) row.append(button("Continue", "Continue answer", () => answer(null, message)));
    row.append(button("Regenerate", "Regenerate answer", () => answer(current.nodes[message.parent])));
    row.append(button("Edit", "Edit answer", () => edit(message)));
  }
  row.append(button("Copy", "Copy message", () => navigator.clipboard?.writeText(message.content)));
  if (!busy) row.append(button("Delete", "Delete message", () => cut(message)));
  if (!isRunning(message)) row.append(node("span", { className: "figures" }, figures(message)));
  return row;
}

const isRunning = (message) => running.has(current.id) && message.id === current.head;

/// Deletes a message with all that follows it.
function cut(message) {
  const follows = Object.values(current.nodes).some((n) => n.parent === message.id);
  if (!confirm(follows ? "Delete this message and all that follow it?" : "Delete this message?")) return;
  drop(current, message);
  touch(current);
  keep(current);
  render();
}

/// What shows the texts of messages, by their elements.
const texts = new WeakMap();

function fill(element, message) {
  let text = texts.get(element);
  if (!text) {
    text = new Written(node("div", { className: "body" }));
    texts.set(element, text);
    element.replaceChildren(text.element);
  }
  const busy = isRunning(message);
  if (message.role === "user") text.element.textContent = message.content;
  else text.show(message.content, busy);
  text.element.hidden = !message.content && message.images?.length > 0;
  const parts = [];
  if (message.images?.length) {
    const images = message.images.map((src, i) => node("img", { src, alt: `Image ${i + 1}` }));
    parts.push(node("div", { className: "images" }, ...images));
  }
  const seconds = Math.round((Date.now() - message.made) / 1000);
  if (message.reasoning) {
    const open = element.querySelector("details")?.open ?? false;
    const thinking = busy && !message.content;
    const word = thinking ? `Thinking… ${seconds} s` : "Thought";
    const thought = Math.round((message.thought ?? 0) - (message.wait ?? 0));
    const took = !thinking && thought > 0 ? ` for ${thought} s` : "";
    const summary = node("summary", { className: thinking ? "busy" : "" }, word + took);
    parts.push(node("details", { open }, summary, node("div", {}, message.reasoning)));
  } else if (busy && !message.content) {
    parts.push(node("p", { className: "busy" }, seconds < 2 ? "Waiting…" : `Waiting… ${seconds} s`));
  }
  const error = message.error ? [node("p", { className: "error", role: "alert" }, message.error)] : [];
  // The text stays where it is, with what is selected and scrolled in it.
  for (const child of [...element.children]) if (child !== text.element) child.remove();
  text.element.before(...parts);
  text.element.after(...error, foot(message));
}

/// A message in a field; what comes of it stands beside the message as it was.
function edit(message) {
  const text = node("textarea", { value: message.content, rows: Math.min(20, message.content.split("\n").length + 2) });
  text.setAttribute("aria-label", "Edit message");
  const asks = message.role === "user";
  const done = () => {
    if (!text.value.trim() && !message.images?.length) return;
    const edited = add(current, message.parent, message.role, text.value.trim(), message.images);
    if (asks) return void answer(edited);
    keep(current);
    render();
  };
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    render();
  });
  const send = button(asks ? "Send" : "Save", asks ? "Send the edited message" : "Save the edited answer", done);
  shown(message.id)?.replaceChildren(text, node("div", { className: "foot" }, send, button("Cancel", "Cancel", render)));
  text.focus();
}

/// How much of the model's context the chat takes, as far as the server has said.
function fullness() {
  const last = path(current).findLast((m) => m.usage);
  const most = served.find((model) => model.id === $("model").value)?.max_model_len;
  const used = last && most ? last.usage.total_tokens / most : 0;
  $("full").textContent = used ? `${Math.round(100 * used)} %` : "";
  $("full").title = used ? `${last.usage.total_tokens.toLocaleString()} of ${most.toLocaleString()} tokens of the context` : "";
  $("full").classList.toggle("error", used > 0.9);
}

const shown = (id) => $("chat").querySelector(`[data-id="${CSS.escape(id)}"]`);

let due = null;

/// Shows what has come of a message with the next frame; the view follows if it was at the end.
function update(message) {
  due ??= requestAnimationFrame(() => {
    due = null;
    const element = shown(message.id);
    if (!element) return;
    const chat = $("chat");
    const follows = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60;
    fill(element, message);
    if (follows) chat.scrollTop = chat.scrollHeight;
  });
}

// A clock beside what is waited for.
setInterval(() => {
  const last = current.nodes[current.head];
  if (last && isRunning(last) && !last.content) update(last);
}, 1000);

function open(conversation) {
  current = conversation;
  $("side").classList.remove("open");
  render();
}

function rename(conversation, entry) {
  const input = node("input", { value: conversation.title, maxLength: 60 });
  input.setAttribute("aria-label", "Title");
  let over = false;
  const done = (kept) => {
    // Taking the field away takes the focus from it, too.
    if (over) return;
    over = true;
    if (kept && input.value.trim()) {
      conversation.title = input.value.trim();
      touch(conversation);
      keep(conversation);
    }
    render();
  };
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") done(true);
    if (event.key === "Escape") done(false);
  });
  input.addEventListener("blur", () => done(true));
  entry.replaceChildren(input);
  input.select();
}

/// The list of conversations, those that hold what is searched for.
function list() {
  const wanted = $("search").value.trim().toLowerCase();
  const holds = (c) =>
    [c.title, ...Object.values(c.nodes).map((n) => n.content)].some((text) => text.toLowerCase().includes(wanted));
  const entries = conversations.filter((c) => !wanted || holds(c)).map((conversation) => {
    const entry = node("div", { className: "entry" });
    const title = conversation.title || "New chat";
    const drop = () => {
      if (!confirm(`Delete "${title}"?`)) return;
      running.get(conversation.id)?.abort();
      remove(conversation.id);
      if (conversation === current) current = conversations[0] ?? create();
      render();
    };
    const label = button(title, title, () => open(conversation));
    if (running.has(conversation.id)) label.classList.add("busy");
    entry.append(
      label,
      button("✎", "Rename", () => rename(conversation, entry)),
      button("×", "Delete", drop),
    );
    if (conversation === current) entry.setAttribute("aria-current", "true");
    return entry;
  });
  $("list").replaceChildren(...entries);
}

function render() {
  list();
  const busy = running.has(current.id);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("chat").setAttribute("aria-busy", busy);
  $("title").textContent = current.title || "New chat";
  for (const name of ["export", "as-markdown"]) $(name).disabled = !current.head;
  $("own-open").classList.toggle("set", OWN.some((name) => current.own?.[name]));
  fullness();
  const messages = path(current).map((message) => {
    const element = node("article", { className: `message ${message.role}` });
    element.dataset.id = message.id;
    fill(element, message);
    return element;
  });
  $("chat").replaceChildren(...(messages.length ? messages : [welcome()]));
  $("chat").scrollTop = $("chat").scrollHeight;
}

/// What a chat without messages shows: the model, what it runs on, how much it reads, and where chats are kept.
function welcome() {
  const model = served.find((m) => m.id === $("model").value);
  const { codes, scheme, format, bits_per_weight: bits } = model?.quantization ?? {};
  const facts = model && [
    model.id,
    [codes ?? scheme ?? format, bits && `${bits} bits per weight`].filter(Boolean).join(", "),
    model.device ? `on ${model.device}` : "loaded at the first message",
    model.max_model_len && `a context of ${model.max_model_len.toLocaleString()} tokens`,
  ];
  return node("div", { className: "welcome" },
    node("p", {}, (facts ?? []).filter(Boolean).join(" · ")),
    node("p", {}, "Chats are kept in this browser only."));
}

function begin() {
  open(conversations.find((c) => !c.head) ?? create());
  $("text").focus();
}

function download(text, type, name) {
  const file = new Blob([text], { type });
  const link = node("a", { href: URL.createObjectURL(file), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

const fileName = () => current.title.replace(/[^\w-]+/g, "-") || "chat";
const json = (value) => JSON.stringify(value, null, 1);

async function upload(file) {
  try {
    const all = imported(await file.text(), file.name);
    all.forEach(keep);
    open(all[0]);
  } catch (e) {
    note(e instanceof SyntaxError ? `${file.name}: not JSON` : e.message, true);
  }
}

async function models() {
  try {
    const response = await call("v1/models");
    if (response.status === 401) {
      preferences();
      $("key").focus();
    }
    if (!response.ok) throw await failure(response);
    const { data } = await response.json();
    served = data;
    $("model").replaceChildren(...data.map((m) => node("option", { value: m.id }, m.id)));
    if (data.some((m) => m.id === settings.model)) $("model").value = settings.model;
    $("models").replaceChildren(...data.map(state));
    if (!current.head) render();
    fullness();
    attachments();
    note("");
  } catch (e) {
    note(e.message, true);
  }
}

/// A row of the table of models: what a model is, and what it is doing.
function state(model) {
  const { codes, format, scheme, bits_per_weight: bits } = model.quantization ?? {};
  const idle = model.running || model.waiting ? "" : `, unused for ${Math.floor(model.idle_seconds / 60)} min`;
  const doing = model.loaded ? `${model.running} running, ${model.waiting} waiting${idle}` : "not loaded";
  const cells = [
    model.id === model.root ? model.id : `${model.id} (${model.root})`,
    [codes ?? scheme ?? format, bits && `${bits} bits per weight`].filter(Boolean).join(", "),
    model.max_model_len ? `${model.max_model_len.toLocaleString()} tokens` : "",
    [doing, model.pinned && "pinned"].filter(Boolean).join(", "),
  ];
  return node("tr", {}, ...cells.map((text) => node("td", {}, text)));
}

const kind = (input) => (input.type === "checkbox" ? "checked" : "value");

/// The settings as they are, whatever was typed and not taken.
function fields() {
  for (const name of SETTINGS) $(name)[kind($(name))] = settings[name] ?? (kind($(name)) === "checked" ? false : "");
  document.documentElement.dataset.theme = settings.theme ?? "";
}

function preferences() {
  fields();
  $("settings").showModal();
}

/// True if a field holds what the server takes; further settings are an object of JSON.
function valid(input) {
  if (input.name === "more") {
    let problem = "";
    try {
      if (input.value && !/^\{/.test(JSON.stringify(JSON.parse(input.value)))) problem = "expected an object";
    } catch (e) {
      problem = e.message;
    }
    input.setCustomValidity(problem);
  }
  return input.checkValidity();
}

/// The settings of the chat: fields like those of all chats, whose values they show while they are empty.
function chatSettings() {
  const rows = OWN.map((name) => {
    const row = $(name).closest("label").cloneNode(true);
    const input = row.querySelector("input, textarea");
    input.id = `own-${name}`;
    input.value = current.own?.[name] ?? "";
    if (settings[name]) input.placeholder = settings[name];
    input.addEventListener("change", () => {
      if (!valid(input)) return;
      current.own = { ...current.own, [name]: input.value || undefined };
      touch(current);
      keep(current);
    });
    return row;
  });
  $("own-fields").replaceChildren(...rows);
  $("own").showModal();
}

/// Takes a setting from its field, if it is one that the server takes.
function set(name, value) {
  settings[name] = value;
  if (!saveSettings()) note("This browser has no room left: delete a conversation.", true);
  document.documentElement.dataset.theme = settings.theme ?? "";
}

function bind() {
  const text = $("text");
  const grow = () => {
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  };
  const submit = (event) => {
    event.preventDefault();
    if (running.has(current.id)) return;
    ask(text.value);
    text.value = "";
    grow();
  };
  text.addEventListener("input", grow);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    // As in a shell: the last message again, to be edited.
    if (event.key === "ArrowUp" && !text.value && !running.has(current.id)) {
      const last = path(current).findLast((m) => m.role === "user");
      if (last) edit(last);
    }
  });
  $("ask").addEventListener("submit", submit);
  $("attach").addEventListener("click", () => $("image-files").click());
  $("image-files").addEventListener("change", async () => {
    await attach($("image-files").files);
    $("image-files").value = "";
    text.focus();
  });
  text.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  const main = document.querySelector("main");
  for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
    main.addEventListener(name, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      main.classList.toggle("over", over);
      if (name === "drop") attach(event.dataTransfer.files);
    });
  }
  $("stop").addEventListener("click", () => running.get(current.id)?.abort());
  $("new").addEventListener("click", begin);
  $("search").addEventListener("input", list);
  $("show").addEventListener("click", () => $("side").classList.add("open"));
  $("hide").addEventListener("click", () => $("side").classList.remove("open"));
  $("own-open").addEventListener("click", chatSettings);
  $("own").addEventListener("close", render);
  $("export").addEventListener("click", () => {
    download(json(exported(current, $("model").value)), "application/json", `${fileName()}.json`);
  });
  $("as-markdown").addEventListener("click", () => download(asMarkdown(current), "text/markdown", `${fileName()}.md`));
  $("export-all").addEventListener("click", () => {
    const chats = conversations.filter((c) => c.head).map((c) => exported(c, $("model").value));
    download(json({ chats }), "application/json", "chats.json");
  });
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    for (const file of $("file").files) await upload(file);
    $("file").value = "";
  });
  $("model").addEventListener("change", () => {
    set("model", $("model").value);
    if (!current.head) render();
    attachments();
    fullness();
  });
  $("settings-open").addEventListener("click", () => {
    preferences();
    models();
  });
  $("settings").addEventListener("close", () => {
    fields();
    models();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running.get(current.id)?.abort();
    if (event.key === "O" && event.ctrlKey && event.shiftKey) {
      event.preventDefault();
      begin();
    }
  });
  for (const name of SETTINGS) {
    const input = $(name);
    input.addEventListener("change", () => valid(input) && set(name, input[kind(input)]));
  }
  fields();
  // What an earlier page took and the server refuses.
  for (const name of [...NUMBERS, "more"]) if (!valid($(name))) set(name, undefined);
  fields();
  window.addEventListener("pagehide", () => {
    for (const conversation of conversations) if (running.has(conversation.id)) save(conversation);
  });
  watch((id) => {
    if (id === null && !$("settings").open) fields();
    if (id && !conversations.some((c) => c.id === id)) running.get(id)?.abort();
    if (!conversations.includes(current)) current = conversations[0] ?? create();
    const busy = running.has(current.id) || $("chat").querySelector("textarea") || $("list").querySelector("input");
    if (busy) return;
    if (id === null || id === current.id) render();
    else list();
  });
}

bind();
render();
models();
$("text").focus();
