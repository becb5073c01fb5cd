// npm's openai as it is, against a server with the demo model.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const asked = { model: "demo", messages: [{ role: "user", content: "Hello!" }], temperature: 0, max_tokens: 300 };
const Film = z.object({ kind: z.enum(["drama", "comedy"]), good: z.boolean() });
const City = z.object({ city: z.enum(["Paris", "Oslo"]) });
const weather = zodFunction({ name: "weather", parameters: City, function: ({ city }) => `rain in ${city}` });

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.ok(text && whole.usage.completion_tokens > 0);
let pieces = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  pieces += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(pieces, text);
const helper = client.chat.completions.stream(asked);
assert.equal(await helper.finalContent(), text);

const parsed = await client.chat.completions.parse({
  ...asked, reasoning_effort: "none", response_format: zodResponseFormat(Film, "film"),
});
assert.ok(Film.safeParse(parsed.choices[0].message.parsed).success);
const answered = await client.responses.parse({
  model: "demo", input: "A film?", max_output_tokens: 300, reasoning: { effort: "none" },
  text: { format: zodTextFormat(Film, "film") },
});
assert.ok(Film.safeParse(answered.output_parsed).success);

const one = { tools: [weather], tool_choice: "required", parallel_tool_calls: false };
const called = await client.chat.completions.parse({ ...asked, ...one });
assert.ok(City.safeParse(called.choices[0].message.tool_calls[0].function.parsed_arguments).success);
const fragments = client.chat.completions.stream({ ...asked, ...one });
const { tool_calls } = (await fragments.finalChatCompletion()).choices[0].message;
assert.ok(City.safeParse(JSON.parse(tool_calls[0].function.arguments)).success);

let last;
for await (const event of await client.responses.create({ model: "demo", input: "Hello!", stream: true })) last = event.type;
assert.equal(last, "response.completed");

await assert.rejects(client.chat.completions.create({ ...asked, model: "other" }), (e) => e.status === 404 && e.code === "model_not_found");
await assert.rejects(client.embeddings.create({ model: "demo", input: "x" }), (e) => e.status === 400);
const aborted = await client.chat.completions.create({ ...asked, stream: true, max_tokens: 1000 });
for await (const _ of aborted) { aborted.controller.abort(); break; }
assert.ok((await client.models.list()).data.some((m) => m.id === "demo"));
console.log("ok: openai of npm");
