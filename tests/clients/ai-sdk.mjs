// Vercel's AI SDK as it is, against a server with the demo model: its providers for OpenAI (chat and responses), for
// compatible servers and for Anthropic; nested objects as outputs and as tools' inputs, whole and streamed, two turns.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "nq", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const models = {
  chat: openai.chat("demo"),
  responses: openai("demo"),
  compatible: compatible("demo"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("demo"),
};
const Play = z.object({ kind: z.enum(["drama", "comedy"]), lead: z.object({ sex: z.enum(["f", "m"]) }) });
const stage = tool({
  description: "Puts a play on stage.",
  inputSchema: z.object({ play: Play }),
  execute: async ({ play }) => ({ ...play, on: true }),
});
/// A stream, read to its end.
const streamed = async (asked) => {
  const result = streamText({ ...asked, onError() {} });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  return result;
};

for (const [name, model] of Object.entries(models)) {
  // The demo model would call on and on.
  const providerOptions = {
    openai: { parallelToolCalls: false },
    nq: { parallel_tool_calls: false },
    anthropic: { disableParallelToolUse: true },
  };
  const asked = { model, maxRetries: 0, maxOutputTokens: 300, providerOptions };
  for (const ask of [generateText, streamed]) {
    const messages = [{ role: "user", content: "Hello!" }];
    const first = await ask({ ...asked, messages });
    assert.ok((await first.text).length > 0, name);
    assert.ok((await first.usage).outputTokens > 0, name);
    messages.push(...(await first.response).messages, { role: "user", content: "A play?" });

    const made = await ask({ ...asked, messages, output: Output.object({ schema: Play }) });
    assert.ok(Play.safeParse(await made.output).success, name);

    // A call that is forced, its result, and the next step, which goes on with both.
    const told = [{ role: "user", content: "Put a play on stage." }];
    const forced = {
      ...asked, messages: told, tools: { stage }, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    };
    const called = await ask(forced);
    const steps = await called.steps;
    assert.equal(steps.length, 2, name);
    const [call] = steps[0].toolCalls;
    assert.ok(Play.safeParse(call.input.play).success, name);
    assert.equal(steps[0].toolResults[0].output.on, true, name);
    told.push(...(await called.response).messages, { role: "user", content: "And?" });
    const next = await ask({ ...asked, messages: told, tools: { stage }, toolChoice: "none" });
    assert.match(await next.finishReason, /stop|length/, name);

    // Either a call or an answer that fits.
    const output = Output.object({ schema: Play });
    const both = await ask({ ...asked, messages: told.slice(0, 1), tools: { stage }, stopWhen: stepCountIs(1), output });
    const [one] = await both.steps;
    if (one.toolCalls.length === 0 && one.finishReason !== "length") {
      assert.ok(Play.safeParse(await both.output).success, name);
    }
  }
  console.log(`ok: AI SDK, ${name}`);
}
