// The page at `/` in a real browser: a chat with branches, hostile text, a phone's width, the keyboard.
// Screenshots go to the folder of this file.

import assert from "node:assert/strict";
import { existsSync } from "node:fs";
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
const page = await browser.newPage();
const [problems, outside] = [[], []];
page.on("console", (m) => ["error", "warn"].includes(m.type()) && problems.push(m.text()));
page.on("pageerror", (e) => problems.push(e.message));
page.on("request", (r) => /^(data:|blob:)/.test(r.url()) || r.url().startsWith(url) || outside.push(r.url()));
const shot = (name) => page.screenshot({ path: join(here, `${name}.png`) });
const text = (selector) => page.$eval(selector, (e) => e.textContent);
const answered = (n) =>
  page.waitForFunction(
    (n) => document.getElementById("stop").hidden && document.querySelector(".assistant .foot")?.textContent.includes(n),
    { timeout: 60000 },
    n,
  );

await page.setViewport({ width: 1200, height: 800 });
await page.goto(`${url}/`);
await page.waitForSelector("#model option");
await page.type("#text", "Hello!");
await page.keyboard.press("Enter");
await answered("tokens");
assert.ok((await text(".assistant .body")).length > 0);
assert.match(await text(".assistant .figures"), /tok\/s.*prompt tokens from the cache/);
await shot("chat");

await page.click(".assistant .foot button[title='Answer again']");
await answered("2 / 2");
await page.click(".assistant .foot button[title='The branch before']");
await answered("1 / 2");
await page.click(".user .foot button[title='Edit this message']");
await page.$eval(".user textarea", (e) => (e.value = ""));
await page.type(".user textarea", "I would like to find a restaurant.");
await page.click(".user .foot button[title='Send what was edited']");
await answered("tokens");
assert.equal(await text(".user .body"), "I would like to find a restaurant.");
assert.match(await text(".user .foot"), /2 \/ 2/);

// What a model writes becomes text, whatever it is, and is kept across a reload.
const hostile = "# Head\n\n**bold** [bad](javascript:alert(1)) <img src=x onerror=alert(1)> ![p](https://example.org/x.png)\n\n```html\n<script>alert(1)</script>\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |";
await page.evaluate((hostile) => {
  const all = JSON.parse(localStorage.getItem("nq.conversations"));
  Object.assign(all[0].nodes[all[0].head], { content: hostile, reasoning: "<b>hm</b>" });
  localStorage.setItem("nq.conversations", JSON.stringify(all));
}, hostile);
await page.reload();
await page.waitForSelector(".assistant pre");
assert.equal(await page.$$eval(".message img, .message script, .message b", (e) => e.length), 0);
assert.equal(await page.$$eval(".message a", (all) => all.filter((a) => !/^https?:/.test(a.href)).length), 0);
assert.match(await text(".assistant pre code"), /<script>/);
assert.equal(await page.$eval(".assistant details", (e) => e.open), false);
assert.equal(await text(".assistant td"), "1");

// The key is kept for this tab alone, unless it is to be remembered.
const stored = () => page.evaluate(() => [localStorage, sessionStorage].map((s) => JSON.stringify({ ...s }).includes("a-secret-key")));
await page.click("#settings-open");
await page.type("#key", "a-secret-key");
await page.keyboard.press("Tab");
assert.deepEqual(await stored(), [false, true]);
await page.click("#remember");
assert.deepEqual(await stored(), [true, true]);
await page.click("#remember");
assert.deepEqual(await stored(), [false, true]);
await shot("settings");
await page.reload();
assert.equal(await page.$eval("#key", (e) => e.value), "a-secret-key");
await page.evaluate(() => {
  document.getElementById("key").value = "";
  document.getElementById("key").dispatchEvent(new Event("change"));
});
await page.waitForSelector(".assistant pre");

await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
await shot("dark");
await page.setViewport({ width: 380, height: 700 });
assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
await shot("phone");

await page.setViewport({ width: 1200, height: 800 });
await page.click("#new");
await page.type("#text", "Continue this passage: It was a dark and stormy night, and");
await page.keyboard.press("Enter");
// A fast machine may have answered before this looks.
await page.waitForFunction(() => !document.getElementById("stop").hidden || document.querySelector(".assistant .foot"));
await page.keyboard.press("Escape");
await page.waitForFunction(() => document.getElementById("stop").hidden);
assert.equal(await page.$$eval("#list .entry", (e) => e.length), 2);

assert.deepEqual(problems, []);
assert.deepEqual(outside, []);
await browser.close();
console.log("ok: page");
