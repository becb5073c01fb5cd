// Images through Vercel's AI SDK as it is, against a server with a model that says how many images it sees.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const baseURL = `${process.argv[2]}/v1`;
const image = readFileSync("pictures/tests/fixtures/gray.png");
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  chat: openai.chat("sees"),
  responses: openai("sees"),
  compatible: createOpenAICompatible({ name: "nq", baseURL, apiKey: "none", includeUsage: true })("sees"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("sees"),
};
const text = { type: "text", text: "How many images?" };
for (const [name, model] of Object.entries(models)) {
  const ask = async (images) => {
    const content = [...images.map((image) => ({ type: "image", image })), text];
    return generateText({ model, maxRetries: 0, maxOutputTokens: 100, messages: [{ role: "user", content }] });
  };
  const [none, one] = [await ask([]), await ask([image])];
  assert.match(one.text, /^I see one image: /, name);
  assert.ok(one.usage.inputTokens > none.usage.inputTokens + 3, name);
  assert.match((await ask([image, `data:image/png;base64,${image.toString("base64")}`])).text, /^I see two images: /, name);
  // A screenshot that a tool took.
  const call = { toolCallId: "c1", toolName: "look" };
  const data = { type: "image-data", data: image.toString("base64"), mediaType: "image/png" };
  const seen = { type: "tool-result", ...call, output: { type: "content", value: [data] } };
  const messages = [
    { role: "user", content: "Look." },
    { role: "assistant", content: [{ type: "tool-call", ...call, input: {} }] },
    { role: "tool", content: [seen] },
  ];
  if (name === "chat" || name === "compatible") continue; // their protocol's results are texts
  const answer = await generateText({ model, maxRetries: 0, maxOutputTokens: 100, messages });
  assert.match(answer.text, /^I see one image: /, name);
}
console.log("ok: images, AI SDK");
