// The page at `/` in a real browser: a chat with branches, several tabs, hostile text, settings, files, a phone's
// width, the keyboard.
// Screenshots go to the folder of this file.

import assert from "node:assert/strict";
import { existsSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import puppeteer from "puppeteer-core";

const url = process.argv[2];
const here = dirname(fileURLToPath(import.meta.url));
let executablePath = "/usr/bin/chromium";
let args = ["--no-sandbox"];
if (!existsSync(executablePath)) {
  const { default: chromium } = await import("@sparticuz/chromium");
  executablePath = await chromium.executablePath();
  args = chromium.args;
}
const browser = await puppeteer.launch({ executablePath, args, headless: true });
const [problems, outside] = [[], []];
const tab = async () => {
  const page = await browser.newPage();
  page.on("console", (m) => ["error", "warn"].includes(m.type()) && problems.push(m.text()));
  page.on("pageerror", (e) => problems.push(e.message));
  page.on("request", (r) => /^(data:|blob:)/.test(r.url()) || r.url().startsWith(url) || outside.push(r.url()));
  await page.setViewport({ width: 1280, height: 800 });
  await page.goto(`${url}/`);
  await page.waitForSelector("#model option");
  return page;
};
const page = await tab();
// Lists are drawn anew whenever a chat is kept: a locator finds its element again if it was replaced meanwhile.
const click = (of, selector) => of.locator(selector).click();
const shot = (name) => page.screenshot({ path: join(here, `${name}.png`) });
const text = (selector) => page.$eval(selector, (e) => e.textContent);
const answered = (n) =>
  page.waitForFunction(
    (n) => document.getElementById("stop").hidden && document.querySelector(".assistant .foot")?.textContent.includes(n),
    { timeout: 60000 },
    n,
  );

await page.type("#text", "Hello!");
await page.keyboard.press("Enter");
await answered("tokens");
assert.ok((await text(".assistant .body")).length > 0);
assert.match(await text(".assistant .figures"), /\d+ tokens in [\d.]+ s.*prompt tokens from the cache/);
await shot("chat");

await click(page, ".assistant .foot button[title='Regenerate answer']");
await answered("2 / 2");
await click(page, ".assistant .foot button[title='Previous version']");
await answered("1 / 2");
await click(page, ".user .foot button[title='Edit message']");
await page.$eval(".user textarea", (e) => (e.value = ""));
await page.type(".user textarea", "I would like to find a restaurant.");
await click(page, ".user .foot button[title='Send the edited message']");
await answered("tokens");
assert.equal(await text(".user .body"), "I would like to find a restaurant.");
assert.match(await text(".user .foot"), /2 \/ 2/);

// What a model writes becomes text, whatever it is, and is kept across a reload.
const written = String.raw`# Head

**bold** [bad](javascript:alert(1)) <img src=x onerror=alert(1)> ![p](https://example.org/x.png)

[Rust](https://en.wikipedia.org/wiki/Rust_(language)) and https://en.wikipedia.org/wiki/C_(language).

~~~js
const a = "x"; // <script>alert(1)</script>
~~~

| left | middle | right |
|:--|:-:|--:|
| 1 | 2 \| 3 | 4 |

Inline $\frac{a}{b^2}$ costs $5 or $6, \(\sqrt{x}\) and

$$
\sum_{i=1}^n \mathbb{R}_i \left( \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \right) \unknown
$$

$$ \frac{ $$`;
/// Changes the shown message as another tab would.
const store = (text, reasoning) =>
  page.evaluate((content, reasoning) => {
    const place = Object.keys(localStorage).find((k) => k.startsWith("nq.conversation."));
    const chat = JSON.parse(localStorage.getItem(place));
    Object.assign(chat.nodes[chat.head], { content, reasoning });
    localStorage.setItem(place, JSON.stringify(chat));
  }, text, reasoning);
await store(written, "<b>hm</b>");
await page.reload();
await page.waitForSelector(".assistant pre");
assert.equal(await page.$$eval(".message img, .message script, .message b", (e) => e.length), 0);
assert.equal(await page.$$eval(".message a", (all) => all.filter((a) => !/^https?:/.test(a.href)).length), 0);
assert.match(await text(".assistant pre code"), /<script>/);
assert.deepEqual(await page.$$eval(".assistant pre span", (all) => all.map((e) => e.className)), ["word", "string", "comment"]);
assert.equal(await page.$eval(".assistant details", (e) => e.open), false);
const cells = await page.$$eval(".assistant td", (all) => all.map((e) => [e.textContent, e.style.textAlign]));
assert.deepEqual(cells, [["1", "left"], ["2 | 3", "center"], ["4", "right"]]);
const links = await page.$$eval(".message a", (all) => all.map((a) => [a.textContent, a.href]));
const wiki = "https://en.wikipedia.org/wiki";
assert.ok(links.some(([t, a]) => t === "Rust" && a === `${wiki}/Rust_(language)`), links);
assert.ok(links.some(([t, a]) => t === a && a === `${wiki}/C_(language)`), links);
assert.equal(await page.$$eval(".assistant mfrac, .assistant msqrt", (e) => e.length), 2);
assert.equal(await page.$$eval('.assistant math[display="block"] munderover, .assistant mtd', (e) => e.length), 5);
const said = await text(".assistant .body");
assert.ok(said.includes("costs $5 or $6") && said.includes("\\unknown") && said.includes("\\frac{") && said.includes("ℝ"), said);

// The key is kept for this tab alone, unless it is to be remembered.
const stored = () => page.evaluate(() => [localStorage, sessionStorage].map((s) => JSON.stringify({ ...s }).includes("a-secret-key")));
await click(page, "#settings-open");
await page.type("#key", "a-secret-key");
await page.keyboard.press("Tab");
assert.deepEqual(await stored(), [false, true]);
await click(page, "#remember");
assert.deepEqual(await stored(), [true, true]);
await click(page, "#remember");
assert.deepEqual(await stored(), [false, true]);
// The settings tell what the server's models are and do.
await page.waitForSelector("#models tr");
assert.match(await text("#models tr"), /demo.*bits.*tokens.*0 running, 0 waiting/);
await shot("settings");
await page.reload();
assert.equal(await page.$eval("#key", (e) => e.value), "a-secret-key");
await page.evaluate(() => {
  document.getElementById("key").value = "";
  document.getElementById("key").dispatchEvent(new Event("change"));
});
await page.waitForSelector(".assistant pre");

// A setting that the server would refuse is not taken, however the dialog is left; its button is in view.
await click(page, "#settings-open");
await page.type("#temperature", "5");
await page.keyboard.press("Tab");
assert.ok(await page.$eval("dialog .end button", (e) => e.getBoundingClientRect().bottom <= innerHeight));
await page.keyboard.press("Escape");
await page.waitForFunction(() => !document.getElementById("settings").open);
await click(page, "#settings-open");
assert.equal(await page.$eval("#temperature", (e) => e.value), "");
await page.type("#max_tokens", "30");
await click(page, "dialog .end button");
assert.equal(await page.evaluate(() => JSON.parse(localStorage.getItem("nq.settings")).temperature ?? null), null);

await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
await shot("dark");
await page.setViewport({ width: 380, height: 700 });
assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
await shot("phone");
await page.setViewport({ width: 1280, height: 800 });

// Two tabs with the same conversation, one after the other: no message is lost.
const questions = (of) =>
  of.evaluate(() => {
    const stored = Object.keys(localStorage).filter((k) => k.startsWith("nq.conversation."));
    const nodes = stored.flatMap((k) => Object.values(JSON.parse(localStorage.getItem(k)).nodes));
    return nodes.filter((n) => n.role === "user").map((n) => n.content);
  });
const ask = async (of, what) => {
  await of.bringToFront();
  await of.type("#text", what);
  await of.keyboard.press("Enter");
  // A fast machine may have answered before this looks.
  const shown = (what) => [...document.querySelectorAll(".user .body")].some((e) => e.textContent === what);
  await of.waitForFunction(shown, {}, what);
};
const idle = (of) => of.waitForFunction(() => document.getElementById("stop").hidden, { timeout: 60000 });
const other = await tab();
await page.bringToFront();
await click(page, "#new");
await ask(page, "First of A");
await idle(page);
await other.bringToFront();
await click(other, "#new");
await ask(other, "First of B");
await idle(other);
await ask(page, "Second of A");
await idle(page);
for (const of of [page, other]) {
  const all = await questions(of);
  for (const wanted of ["First of A", "First of B", "Second of A"]) assert.ok(all.includes(wanted), all);
}
await other.waitForFunction(() => document.getElementById("list").textContent.includes("First of A"));
// Deleted here, gone there.
await other.bringToFront();
other.on("dialog", (d) => d.accept());
await click(other, '#list .entry[aria-current] button[title="Delete"]');
await page.waitForFunction(() => !document.getElementById("list").textContent.includes("First of B"));
await other.close();
await page.bringToFront();

// Another chat can be begun while one is answered, and an answer can be stopped.
await page.evaluate(() => {
  document.getElementById("max_tokens").value = "";
  document.getElementById("max_tokens").dispatchEvent(new Event("change"));
});
await ask(page, "Continue this passage: It was a dark and stormy night, and");
await click(page, "#new");
assert.equal(await text("#title"), "New chat");
assert.equal(await page.$$eval(".message", (e) => e.length), 0);
await ask(page, "Tell me about a film.");
await page.keyboard.press("Escape");
await idle(page);
// The list is in order of changes, and the first chat's answer may have ended after the second was begun.
await page.evaluate(() => {
  const entries = [...document.querySelectorAll("#list .entry")];
  entries.find((e) => e.textContent.includes("First of A")).querySelector("button").click();
});
await page.waitForFunction(() =>
  [...document.querySelectorAll(".user .body")].some((e) => e.textContent.includes("stormy night")),
);
await idle(page);
const answers = await page.$$eval(".assistant .body", (bodies) => bodies.map((e) => e.textContent));
assert.equal(answers.length, 3);
assert.ok(answers.at(-1).length > 0);

// Left in mid-answer: what was there is kept, and can be answered again.
await click(page, "#new");
await ask(page, "I would like to find a museum.");
await page.reload();
await page.waitForSelector("#model option");
await page.waitForSelector(".assistant .foot button[title='Regenerate answer']");

// Titles, search and files.
await page.locator("#list .entry[aria-current]").hover();
await click(page, "#list .entry[aria-current] button[title='Rename']");
await page.keyboard.type("Of museums");
await page.keyboard.press("Enter");
assert.equal(await text("#title"), "Of museums");
await page.type("#search", "stormy NIGHT");
assert.equal(await page.$$eval("#list .entry", (e) => e.length), 1);
await page.$eval("#search", (e) => {
  e.value = "";
  e.dispatchEvent(new Event("input"));
});
const exported = await page.evaluate(async () => {
  const kept = URL.createObjectURL;
  const file = new Promise((resolve) => (URL.createObjectURL = (blob) => (resolve(blob.text()), kept(blob))));
  document.getElementById("export").click();
  return file;
});
const messages = JSON.parse(exported).messages;
assert.deepEqual(messages[0], { role: "user", content: "I would like to find a museum." });
const files = { "exported.json": exported, "saved.json": JSON.stringify({ model: "demo", messages: [{ role: "system", content: "x" }, ...messages] }) };
for (const [name, content] of Object.entries({ ...files, "wrong.json": '{"nodes": {"a": {"id": "a", "parent": "a", "role": "user", "content": "x"}}}' })) {
  writeFileSync(join(here, name), content);
  const input = await page.$("#file");
  const before = await page.$$eval("#list .entry", (e) => e.length);
  await input.uploadFile(join(here, name));
  if (name in files) {
    await page.waitForFunction((n) => document.querySelectorAll("#list .entry").length === n + 1, {}, before);
    assert.equal(await text(".user .body"), "I would like to find a museum.");
  } else {
    await page.waitForFunction(() => document.getElementById("note").textContent.includes("wrong.json: expected"));
  }
}
assert.equal(await page.$eval("#list .entry[aria-current]", (e) => e.textContent.includes("I would like")), true);

// Settings of this chat alone, an answer that goes on behind its limit, edits and deletions.
await click(page, "#new");
await click(page, "#own-open");
await page.type("#own-system", "Be brief.");
await page.type("#own-max_tokens", "4");
await page.type("#own-more", "[1]");
await page.keyboard.press("Tab");
assert.equal(await page.$eval("#own-more", (e) => e.validity.valid), false);
await page.$eval("#own-more", (e) => (e.value = ""));
await page.type("#own-more", '{"temperature": 0, "chat_template_kwargs": {"enable_thinking": false}}');
await page.keyboard.press("Tab");
await page.$$eval("#own .end button", (all) => all.at(-1).click());
const asked = page.waitForRequest((r) => r.url().includes("/v1/chat"));
await ask(page, "Tell me about a film.");
const body = JSON.parse((await asked).postData());
assert.deepEqual([body.max_tokens, body.temperature, body.messages[0]], [4, 0, { role: "system", content: "Be brief." }]);
await page.waitForSelector(".assistant .foot button[title='Continue answer']");
assert.match(await text("#full"), /^\d+ %$/);
const cut = await text(".assistant .body");
await click(page, ".assistant .foot button[title='Continue answer']");
await page.waitForFunction((n) => document.querySelector(".assistant .body").textContent.length > n, {}, cut.length);
await idle(page);
assert.ok((await text(".assistant .body")).startsWith(cut));
await click(page, ".user .foot button[title='Edit message']");
await page.waitForSelector(".user textarea");
await page.keyboard.press("Escape");
assert.equal(await page.$(".user textarea"), null);
await click(page, ".assistant .foot button[title='Edit answer']");
await page.waitForSelector(".assistant textarea");
const steps = "1. Run\n   ```sh\n   pip install foo\n   ```\n\n   and more.\n- [x] done\n\n***both***, $\\boxed{42}$, a<br>b";
await page.$eval(".assistant textarea", (e, value) => (e.value = value), steps);
await click(page, ".assistant .foot button[title='Save the edited answer']");
assert.equal(await text(".assistant ol li pre code"), "pip install foo");
assert.match(await text(".assistant ol li"), /and more\.$/);
assert.equal(await page.$eval(".assistant li input", (e) => e.checked && e.disabled), true);
assert.equal(await page.$$eval(".assistant em strong, .assistant .boxed, .assistant p > br", (e) => e.length), 3);
page.once("dialog", (d) => d.accept());
await click(page, ".assistant .foot button[title='Delete message']");
await page.waitForFunction(() => !document.querySelector(".assistant .foot").textContent.includes("/ 2"));
await page.reload();
await page.waitForSelector(".assistant .body");
assert.ok((await text(".assistant .body")).startsWith(cut));

// A long text is shown in pieces as it is shown at once.
const pieces = await page.evaluate(async () => {
  const { Written } = await import("/page/markdown.js");
  const text = "1. a\n   ```js\n   let b;\n   ```\n2. c\n\n   d\n\n> e\n\n$$f$$\n\ng\n===\n\n| h |\n|---|\n| i |\n".repeat(20);
  const [whole, grown] = [document.createElement("div"), document.createElement("div")];
  new Written(whole).show(text, false);
  const written = new Written(grown);
  for (let i = 1; i <= text.length; i++) written.show(text.slice(0, i), true);
  return [whole.innerHTML, grown.innerHTML];
});
assert.equal(pieces[0], pieces[1]);

// A server that is gone is named as such.
await page.setRequestInterception(true);
page.on("request", (r) => (r.url().includes("/v1/chat") ? r.abort() : r.continue()));
await click(page, "#new");
await page.type("#text", "Anyone?");
await page.keyboard.press("Enter");
await page.waitForSelector(".assistant .error");
assert.match(await text(".assistant .error"), /server does not answer/);
assert.ok(problems.pop().includes("ERR_FAILED"));

assert.deepEqual(problems, []);
assert.deepEqual(outside, []);
await browser.close();
console.log("ok: page");
