// The AI SDK with its provider for compatible servers: text, streams, tools, objects, errors. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";

const [address, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "parley", baseURL: `http://${address}/v1`, supportsStructuredOutputs: true });
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

const looked = [];
const weather = {
  get_weather: tool({
    ...tools.get_weather,
    execute: ({ city }) => looked.push(city) && { city, sky: "sunny", temperature: 21 },
  }),
};
for (const thinking of [false, true]) {
  const providerOptions = { parley: { chat_template_kwargs: { enable_thinking: thinking } } };
  const more = { ...common, providerOptions, maxOutputTokens: 300 };
  // three rounds of calls, each of which the SDK answers; the first is the model's own idea
  const loop = {
    ...more,
    prompt: "What is the weather in Paris?",
    tools: weather,
    stopWhen: stepCountIs(4),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 1 || stepNumber === 2 ? "required" : "auto" }),
  };
  looked.length = 0;
  const rounds = await generateText(loop);
  assert.equal(rounds.steps.slice(0, 3).filter((step) => step.toolCalls.length === 1).length, 3);
  assert.equal(looked.length, rounds.steps.flatMap((step) => step.toolCalls).length);
  assert.equal(looked[0], "Paris");
  looked.length = 0;
  const flowing = streamText(loop);
  await flowing.consumeStream();
  assert.ok((await flowing.steps).slice(0, 3).every((step) => step.toolCalls.length === 1));
  if (thinking) assert.ok((await flowing.steps)[0].reasoningText.includes("get_weather"));

  const two = await generateText({ ...more, prompt: "What is the weather in Paris and London?", tools });
  assert.deepEqual(two.toolCalls.map((call) => call.input.city), ["Paris", "London"]);
  const both = streamText({ ...more, prompt: "What is the weather in Paris and London?", tools });
  await both.consumeStream();
  assert.deepEqual((await both.toolCalls).map((call) => call.input.city), ["Paris", "London"]);
  for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
    const forced = await generateText({ ...more, prompt: "Hello!", tools, toolChoice });
    assert.equal(forced.toolCalls[0].toolName, "get_weather");
    const streamed = streamText({ ...more, prompt: "Hello!", tools, toolChoice });
    await streamed.consumeStream();
    assert.equal((await streamed.toolCalls)[0].toolName, "get_weather");
  }
  assert.equal((await generateText({ ...more, prompt, tools, toolChoice: "none" })).toolCalls.length, 0);

  const schema = jsonSchema({
    type: "object",
    properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
    required: ["name", "age", "city"],
    additionalProperties: false,
  });
  const asked = { ...more, prompt: "Give me JSON for a person: Anna, 31 years old, from Paris.", schema };
  const { object } = await generateObject(asked);
  if (thinking) assert.deepEqual(Object.keys(object), ["name", "age", "city"]);
  else assert.deepEqual(object, { name: "Anna", age: 31, city: "Paris" });
  const parts = streamObject(asked);
  for await (const part of parts.partialObjectStream) part;
  assert.deepEqual(await parts.object, object);
}

assert.ok((await generateText({ ...common, model: provider.completionModel(name), prompt: "Hello", maxOutputTokens: 4 })).text);
await assert.rejects(generateText({ ...common, prompt, temperature: -1 }), /temperature/);
console.log("good");
