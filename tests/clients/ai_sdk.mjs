// The AI SDK with its provider for compatible servers: text, streams, tools, errors. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [address, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "parley", baseURL: `http://${address}/v1` });
const model = provider(name);
const prompt = "What is the capital of France?";
const ANSWER = "The capital of France is Paris.";
const common = { model, temperature: 0, maxRetries: 0 };

const whole = await generateText({ ...common, prompt });
assert.equal(whole.text, ANSWER);
assert.equal(whole.finishReason, "stop");
assert.ok(whole.usage.outputTokens > 0);
let said = "";
for await (const part of streamText({ ...common, prompt }).textStream) said += part;
assert.equal(said, ANSWER);

const tools = {
  get_weather: tool({
    description: "Get the current weather in a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  }),
};
const called = await generateText({ ...common, prompt: "What is the weather in Paris?", tools });
assert.deepEqual(called.toolCalls[0].input, { city: "Paris" });
const streamed = streamText({ ...common, prompt: "What is the weather in Paris?", tools });
await streamed.consumeStream();
assert.deepEqual((await streamed.toolCalls)[0].input, { city: "Paris" });

assert.ok((await generateText({ ...common, model: provider.completionModel(name), prompt: "Hello", maxOutputTokens: 4 })).text);
await assert.rejects(generateText({ ...common, prompt, temperature: -1 }), /temperature/);
console.log("good");
