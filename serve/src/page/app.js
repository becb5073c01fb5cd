// The page: what is shown, and what goes to the server and comes back.

import { markdown } from "./markdown.js";
import { add, conversations, create, path, remove, save, settings, show, siblings } from "./store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];

let current = conversations[0] ?? create();
/// Ends the answer under way.
let running = null;

function node(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function note(text, error = false) {
  $("note").textContent = text;
  $("note").classList.toggle("error", error);
}

function keep() {
  if (!save()) note("This browser has no room left: delete a conversation.", true);
}

function headers() {
  const all = { "content-type": "application/json" };
  if (settings.key) all.authorization = `Bearer ${settings.key}`;
  return all;
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const wait = response.headers.get("retry-after");
  const later = wait ? ` (again in ${wait} s)` : "";
  return new Error((body?.error?.message ?? `the server says ${response.status}`) + later);
}

/// The pieces of an event stream's data.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function request(messages) {
  const body = {
    model: $("model").value || undefined,
    messages: messages.map(({ role, content }) => ({ role, content })),
    stream: true,
    stream_options: { include_usage: true },
    chat_template_kwargs: settings.thinking ? undefined : { enable_thinking: false },
  };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

/// Answers the message `parent`, beside answers that it may have.
async function answer(parent) {
  const conversation = current;
  const messages = path(conversation, parent.id);
  const made = add(conversation, parent.id, "assistant", "");
  made.reasoning = "";
  running = new AbortController();
  busy(true);
  render();
  const begun = performance.now();
  let first = 0;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request(messages)),
      signal: running.signal,
    });
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      if ((delta.content || delta.reasoning_content) && !first) first = performance.now();
      made.reasoning += delta.reasoning_content ?? "";
      made.content += delta.content ?? "";
      if (event.choices?.[0]?.finish_reason === "length") made.cut = true;
      if (event.usage) made.usage = event.usage;
      update(made);
    }
    const seconds = (performance.now() - (first || begun)) / 1000;
    made.speed = made.usage && seconds > 0 ? (made.usage.completion_tokens - 1) / seconds : 0;
    made.wait = first ? (first - begun) / 1000 : 0;
    note("");
  } catch (e) {
    if (e.name === "AbortError") made.stopped = true;
    else made.error = e.message;
  }
  running = null;
  busy(false);
  keep();
  render();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

function ask(text) {
  if (running || !text.trim()) return;
  const message = add(current, current.head, "user", text.trim());
  keep();
  answer(message);
}

function button(text, title, action) {
  const made = node("button", { type: "button", className: "plain", title }, text);
  made.setAttribute("aria-label", title);
  made.addEventListener("click", action);
  return made;
}

/// What stands below a message: branches, what can be done, figures.
function foot(message) {
  const row = node("div", { className: "foot" });
  const all = siblings(current, message);
  const at = all.indexOf(message);
  const to = (i) => () => {
    show(current, all[i]);
    keep();
    render();
  };
  if (all.length > 1) {
    const before = button("‹", "The branch before", to(at - 1));
    const after = button("›", "The next branch", to(at + 1));
    before.disabled = at === 0;
    after.disabled = at === all.length - 1;
    row.append(before, `${at + 1} / ${all.length}`, after);
  }
  if (!running) {
    if (message.role === "user") row.append(button("edit", "Edit this message", () => edit(message)));
    else row.append(button("again", "Answer again", () => answer(current.nodes[message.parent])));
  }
  row.append(button("copy", "Copy this message", () => navigator.clipboard?.writeText(message.content)));
  const figures = [];
  if (message.speed > 0) figures.push(`${message.speed.toFixed(1)} tok/s`);
  if (message.wait) figures.push(`first after ${message.wait.toFixed(2)} s`);
  if (message.usage) {
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = message.usage;
    figures.push(`${tokens} tokens`, `${details?.cached_tokens ?? 0} of ${prompt} prompt tokens from the cache`);
  }
  if (message.cut) figures.push("cut off");
  if (message.stopped) figures.push("stopped");
  row.append(node("span", { className: "figures" }, figures.join(" · ")));
  return row;
}

function fill(element, message) {
  const body = node("div", { className: "body" });
  if (message.role === "user") body.textContent = message.content;
  else body.append(markdown(message.content));
  const open = element.querySelector("details")?.open ?? false;
  const parts = [];
  if (message.reasoning) {
    const thought = node("details", { open }, node("summary", {}, "Thinking"), node("div", {}, message.reasoning));
    parts.push(thought);
  }
  parts.push(body);
  if (message.error) parts.push(node("p", { className: "error", role: "alert" }, message.error));
  element.replaceChildren(...parts, foot(message));
}

function edit(message) {
  const element = document.querySelector(`[data-id="${message.id}"]`);
  const text = node("textarea", { value: message.content, rows: 3 });
  text.setAttribute("aria-label", "Edit this message");
  const send = button("send", "Send what was edited", () => {
    if (!text.value.trim()) return;
    const edited = add(current, message.parent, "user", text.value.trim());
    keep();
    answer(edited);
  });
  element.replaceChildren(text, node("div", { className: "foot" }, send, button("cancel", "Leave it as it was", render)));
  text.focus();
}

/// Shows what has come of a message; the view follows if it was at the end.
function update(message) {
  const chat = $("chat");
  const element = chat.querySelector(`[data-id="${message.id}"]`);
  if (!element) return;
  const follows = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60;
  fill(element, message);
  if (follows) chat.scrollTop = chat.scrollHeight;
}

function render() {
  const entries = conversations.map((conversation) => {
    const open = button(conversation.title || "New conversation", conversation.title || "New conversation", () => {
      if (running) return;
      current = conversation;
      $("side").classList.remove("open");
      render();
    });
    const drop = button("×", "Delete this conversation", () => {
      if (running || !confirm("Delete this conversation?")) return;
      remove(conversation.id);
      if (conversation === current) current = conversations[0] ?? create();
      keep();
      render();
    });
    const entry = node("div", { className: "entry" }, open, drop);
    if (conversation === current) entry.setAttribute("aria-current", "true");
    return entry;
  });
  $("list").replaceChildren(...entries);
  $("title").textContent = current.title || "New conversation";
  const messages = path(current).map((message) => {
    const element = node("article", { className: `message ${message.role}` });
    element.dataset.id = message.id;
    fill(element, message);
    return element;
  });
  $("chat").replaceChildren(...messages);
  $("chat").scrollTop = $("chat").scrollHeight;
}

function begin() {
  if (running) return;
  if (path(current).length) current = conversations.find((c) => !c.head) ?? create();
  $("side").classList.remove("open");
  render();
  $("text").focus();
}

async function models() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) {
      $("settings").showModal();
      $("key").focus();
    }
    if (!response.ok) throw await failure(response);
    const { data } = await response.json();
    $("model").replaceChildren(...data.map((m) => node("option", { value: m.id }, m.id)));
    note("");
  } catch (e) {
    note(e.message, true);
  }
}

function bind() {
  const text = $("text");
  const grow = () => {
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  };
  const submit = (event) => {
    event.preventDefault();
    if (running) return;
    ask(text.value);
    text.value = "";
    grow();
  };
  text.addEventListener("input", grow);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    // As in a shell: the last message again, to be edited.
    if (event.key === "ArrowUp" && !text.value && !running) {
      const last = path(current).findLast((m) => m.role === "user");
      if (last) edit(last);
    }
  });
  $("ask").addEventListener("submit", submit);
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", begin);
  $("show").addEventListener("click", () => $("side").classList.add("open"));
  $("hide").addEventListener("click", () => $("side").classList.remove("open"));
  $("settings-open").addEventListener("click", () => $("settings").showModal());
  $("settings").addEventListener("close", models);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("settings").open) running.abort();
    if (event.key === "O" && event.ctrlKey && event.shiftKey) {
      event.preventDefault();
      begin();
    }
  });
  for (const name of [...NUMBERS, "system", "thinking", "theme", "key", "remember"]) {
    const input = $(name);
    const kind = input.type === "checkbox" ? "checked" : "value";
    if (settings[name] !== undefined) input[kind] = settings[name];
    input.addEventListener("change", () => {
      settings[name] = input[kind];
      keep();
      document.documentElement.dataset.theme = settings.theme ?? "";
    });
  }
  document.documentElement.dataset.theme = settings.theme ?? "";
}

bind();
render();
models();
$("text").focus();
