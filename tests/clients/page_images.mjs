// Images on the page at `/` in a real browser: attached, pasted, dropped, kept, sent. A stand-in for the model has its
// requests looked at; at last one answers that says how many images it sees.

import assert from "node:assert/strict";
import { existsSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import puppeteer from "puppeteer-core";

const url = process.argv[2];
let executablePath = "/usr/bin/chromium";
let args = ["--no-sandbox"];
if (!existsSync(executablePath)) {
  const { default: chromium } = await import("@sparticuz/chromium");
  executablePath = await chromium.executablePath();
  args = chromium.args;
}
const browser = await puppeteer.launch({ executablePath, args, headless: true });
const page = await browser.newPage();
const [problems, asked] = [[], []];
let played = true; // the stand-in answers
page.on("console", (m) => ["error", "warn"].includes(m.type()) && problems.push(m.text()));
page.on("pageerror", (e) => problems.push(e.message));
const card = (id, input_modalities) => ({ id, root: id, loaded: true, max_model_len: 1000, input_modalities });
const answer = [
  { choices: [{ delta: { content: "A cat." } }] },
  { choices: [], usage: { prompt_tokens: 5, completion_tokens: 3, total_tokens: 8 } },
];
await page.setRequestInterception(true);
page.on("request", (request) => {
  if (!played) return request.continue();
  if (request.url().endsWith("/v1/models")) {
    const data = [card("sees", ["text", "image"]), card("reads", ["text"])];
    return request.respond({ contentType: "application/json", body: JSON.stringify({ data }) });
  }
  if (!request.url().endsWith("/v1/chat/completions")) return request.continue();
  asked.push(JSON.parse(request.postData()).messages);
  const body = [...answer.map((event) => JSON.stringify(event)), "[DONE]"].map((data) => `data: ${data}\n\n`);
  request.respond({ contentType: "text/event-stream", body: body.join("") });
});
await page.goto(`${url}/`);
await page.waitForFunction(() => !document.getElementById("attach").hidden);

// The smallest PNG, red.
const png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";
const file = join(tmpdir(), `nq-${process.pid}.png`);
writeFileSync(file, Buffer.from(png, "base64"));
const attached = (n) => page.waitForFunction((n) => document.querySelectorAll("#images img").length === n, {}, n);
const answered = () =>
  page.waitForFunction(() => document.querySelector(".assistant .foot")?.textContent.includes("tokens"));
const attach = async () => {
  const [chooser] = await Promise.all([page.waitForFileChooser(), page.click("#attach")]);
  await chooser.accept([file]);
};
/// A file of an image of this width, pasted or dropped.
const give = (width, kind) =>
  page.evaluate(
    async (width, kind) => {
      const canvas = document.createElement("canvas");
      Object.assign(canvas, { width, height: 10 });
      const blob = await new Promise((done) => canvas.toBlob(done));
      const data = new DataTransfer();
      data.items.add(new File([blob], "a.png", { type: "image/png" }));
      const event = { bubbles: true, cancelable: true };
      if (kind === "paste") {
        const pasted = new ClipboardEvent("paste", { ...event, clipboardData: data });
        document.getElementById("text").dispatchEvent(pasted);
      } else document.querySelector("main").dispatchEvent(new DragEvent("drop", { ...event, dataTransfer: data }));
    },
    width,
    kind,
  );

await attach();
await attached(1);
await page.click("#images button");
await attached(0);
await attach();
await attached(1);
await give(3000, "paste");
await attached(2);
await give(30, "drop");
await attached(3);
await page.type("#text", "What is it?");
await page.keyboard.press("Enter");
await answered();
const [message] = asked[0];
assert.deepEqual(message.content.map((part) => part.type), ["image_url", "image_url", "image_url", "text"]);
assert.equal(message.content[0].image_url.url, `data:image/png;base64,${png}`);
// A large one was made smaller.
assert.match(message.content[1].image_url.url, /^data:image\/jpeg;base64,/);

// They are kept, and stay with an edited message.
await page.reload();
await page.waitForSelector(".user .images img");
const shown = await page.$$eval(".user .images img", (all) => all.map((image) => image.naturalWidth));
assert.deepEqual(shown, [1, 2048, 30]);
await page.click(".user .foot button[title='Edit message']");
await page.type(".user textarea", " Really?");
await page.click(".user .foot button[title='Send the edited message']");
await page.waitForFunction(() => document.querySelector(".user .body")?.textContent.endsWith("Really?"));
await answered();
assert.equal(asked[1][0].content.length, 4);

// An image alone is a message; a model that reads text alone takes none.
await page.click("#new");
await attach();
await attached(1);
await page.click("#send");
await answered();
assert.deepEqual(asked[2][0].content.map((part) => part.type), ["image_url", "text"]);
await page.select("#model", "reads");
assert.ok(await page.$eval("#attach", (button) => button.hidden));
await give(30, "paste");
await page.waitForFunction(() => document.getElementById("note").textContent.includes("reads text alone"));

played = false;
await page.reload();
await page.waitForFunction(() => !document.getElementById("attach").hidden);
await page.click("#new");
await attach();
await attach();
await attached(2);
await page.click("#send");
await page.waitForFunction(() => document.querySelector(".assistant .body")?.textContent.includes("I see two images: "));

assert.deepEqual(problems, []);
await browser.close();
console.log("ok: images on the page");
