// Ollama's JavaScript library: chat, generate, vectors, streams, abort, lists of models, errors. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import { Ollama } from "ollama";

const [address, model] = process.argv.slice(2);
const ollama = new Ollama({ host: `http://${address}` });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ANSWER = "The capital of France is Paris.";
const options = { temperature: 0, num_predict: 300 };
const parameters = { type: "object", required: ["city"], properties: { city: { type: "string" } } };
const description = "Get the current weather in a city.";
const tools = [{ type: "function", function: { name: "get_weather", description, parameters } }];

const answer = await ollama.chat({ model, messages, options, think: false });
assert.equal(answer.message.content, ANSWER);
let text = "";
for await (const part of await ollama.chat({ model, messages, options, think: false, stream: true })) text += part.message.content;
assert.equal(text, ANSWER);
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const call = await ollama.chat({ model, messages: weather, tools, options });
assert.deepEqual(call.message.tool_calls[0].function.arguments, { city: "Paris" });
const raw = await ollama.generate({ model, prompt: "The capital of", raw: true, options: { ...options, num_predict: 4 } });
assert.equal(raw.eval_count, 4);
assert.equal((await ollama.embed({ model, input: ["a", "b"] })).embeddings.length, 2);
assert((await ollama.list()).models.some((entry) => entry.model === `${model}:latest`));
assert((await ollama.ps()).models.length);
assert((await ollama.show({ model })).capabilities.includes("tools"));
let status = "";
for await (const line of await ollama.pull({ model, stream: true })) status = line.status;
assert.equal(status, "success");
await assert.rejects(ollama.chat({ model: "x", messages }), /model 'x' not found/);
await assert.rejects(ollama.delete({ model }), /Deleting models is not available/);
const long = await ollama.generate({ model, prompt: "a b c", raw: true, stream: true, options: { num_predict: 2000 } });
await assert.rejects(async () => {
  for await (const part of long) if (part.response) ollama.abort();
}, { name: "AbortError" });
assert.equal((await ollama.version()).version.split(".").length, 3);
console.log("good");
