// The AI SDK with its default provider, which speaks the Responses API. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [address, name] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: `http://${address}/v1`, apiKey: "none" });
const common = { model: provider(name), temperature: 0, maxRetries: 0 };
const prompt = "What is the capital of France?";
const ANSWER = "The capital of France is Paris.";

const whole = await generateText({ ...common, prompt, include: { responseBody: true } });
assert.equal(whole.text, ANSWER);
let said = "";
for await (const part of streamText({ ...common, prompt }).textStream) said += part;
assert.equal(said, ANSWER);

// two turns: the second refers to the items of the first, or sends them if they are not stored
const isStored = whole.response.body.store;
const stores = isStored ? [true, false] : [false];
for (const store of stores) {
  const providerOptions = { openai: { store } };
  const first = await generateText({ ...common, prompt, providerOptions });
  const messages = [{ role: "user", content: prompt }, ...first.response.messages, { role: "user", content: prompt }];
  assert.equal((await generateText({ ...common, messages, providerOptions })).text, ANSWER);

  const looked = [];
  const tools = {
    get_weather: tool({
      description: "Get the current weather in a city.",
      inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
      execute: ({ city }) => looked.push(city) && { city, sky: "sunny", temperature: 21 },
    }),
  };
  const loop = { ...common, prompt: "What is the weather in Paris?", tools, stopWhen: stepCountIs(3), providerOptions };
  assert.ok((await generateText(loop)).text.includes("Paris"));
  const flowing = streamText(loop);
  await flowing.consumeStream();
  assert.ok((await flowing.text).includes("Paris"));
  assert.deepEqual(looked, ["Paris", "Paris"]);
}

const properties = { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } };
const schema = jsonSchema({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
const person = "Mia is 34 years old and lives in Rome. Give name, age and city as JSON.";
const made = await generateObject({ ...common, prompt: person, schema, providerOptions: { openai: { store: false } } });
assert.deepEqual(made.object, { name: "Mia", age: 34, city: "Rome" });
console.log("good");
