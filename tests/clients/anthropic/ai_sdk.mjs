// The AI SDK's provider for Anthropic's API: text, streams and tools.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [address, name] = process.argv.slice(2);
const model = createAnthropic({ baseURL: `http://${address}/v1`, apiKey: "none" })(name);
const hello = await generateText({ model, prompt: "Hello", maxRetries: 0 });
assert.match(hello.text, /^Hello/);
assert.ok(hello.usage.inputTokens > 0 && hello.usage.outputTokens > 0);

const weather = tool({
  description: "Get the weather in a city.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: async ({ city }) => ({ city, sky: "sunny", temperature: 20 }),
});
const stream = streamText({
  model,
  prompt: "What is the weather in Paris?",
  tools: { get_weather: weather },
  stopWhen: stepCountIs(2),
  maxRetries: 0,
});
let text = "";
for await (const piece of stream.textStream) text += piece;
const [first] = await stream.steps;
assert.deepEqual(first.toolCalls[0].input, { city: "Paris" });
assert.match(text, /Paris/);
console.log("good");
