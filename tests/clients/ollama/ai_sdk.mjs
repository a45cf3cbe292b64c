// The AI SDK with its provider for Ollama: text, streams, a tool, an object, thinking, vectors. Arguments: HOST:PORT MODEL.
import assert from "node:assert/strict";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const [address, name] = process.argv.slice(2);
const ollama = createOllama({ baseURL: `http://${address}/api` });
const model = ollama(name);
const capital = { model, prompt: "What is the capital of France?", temperature: 0 };

const { text, usage } = await generateText(capital);
assert.match(text, /Paris/);
const stream = streamText(capital);
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
assert.equal(streamed, text);
assert.deepEqual((await stream.usage).outputTokens, usage.outputTokens);

const tools = {
  get_weather: tool({
    description: "Get the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ city, sky: "sunny", temperature: 21 }),
  }),
};
const weather = { model, prompt: "What is the weather in Paris?", tools, stopWhen: stepCountIs(3), temperature: 0 };
const { steps, text: report } = await generateText(weather);
assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [{ city: "Paris" }]);
assert.match(report, /sunny/);
const kinds = [];
for await (const part of streamText(weather).fullStream) kinds.push(part.type);
assert.ok(kinds.includes("tool-call") && kinds.includes("tool-result"), kinds.join());

const schema = z.object({ stars: z.number().int().min(1).max(3), mood: z.enum(["good", "bad"]) });
const { object } = await generateObject({ ...capital, schema });
assert.ok([1, 2, 3].includes(object.stars));
const thinking = { ...capital, prompt: "What is 47 + 38?", providerOptions: { ollama: { think: true } } };
const thought = await generateText(thinking);
assert.match(thought.text, /85/);
assert.ok(thought.reasoningText);
const { embeddings } = await embedMany({ model: ollama.embedding(name), values: ["a", "b"] });
assert.equal(embeddings.length, 2);
console.log("good");
