// OpenAI's client for Node with the Responses API. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import OpenAI from "openai";

const [address, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "none", maxRetries: 0 });
const input = "What is the capital of France?";
const ANSWER = "The capital of France is Paris.";
const weather = {
  type: "function",
  name: "get_weather",
  description: "Get the current weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
  strict: true,
};

const whole = await client.responses.create({ model, input, temperature: 0 });
assert.equal(whole.output_text, ANSWER);
let said = "";
for await (const event of await client.responses.create({ model, input, temperature: 0, stream: true }))
  if (event.type === "response.output_text.delta") said += event.delta;
assert.equal(said, ANSWER);
const helper = client.responses.stream({ model, input, temperature: 0 });
assert.equal((await helper.finalResponse()).output_text, ANSWER);
const schema = { type: "object", properties: { name: { type: "string" } }, required: ["name"], additionalProperties: false };
const format = { type: "json_schema", name: "city", schema, strict: true };
const parsed = await client.responses.parse({ model, input: "Name a city.", text: { format }, temperature: 0 });
assert.ok(parsed.output_parsed?.name !== undefined || parsed.status === "incomplete");

const question = { role: "user", content: "What is the weather in Paris?" };
const called = await client.responses.create({ model, input: [question], tools: [weather], temperature: 0 });
const call = called.output.find((item) => item.type === "function_call");
assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
const output = { type: "function_call_output", call_id: call.call_id, output: '{"city": "Paris", "sky": "sunny"}' };
const told = await client.responses.create({
  model,
  input: [question, ...called.output, output],
  tools: [weather],
  temperature: 0,
});
assert.ok(told.output_text.includes("Paris"));

if (whole.store) {
  let running = await client.responses.create({ model, input, background: true, temperature: 0 });
  while (["queued", "in_progress"].includes(running.status)) running = await client.responses.retrieve(running.id);
  assert.equal(running.output_text, ANSWER);
  const seen = [];
  for await (const event of await client.responses.create({ model, input, background: true, stream: true }))
    seen.push(event);
  const again = [];
  for await (const event of await client.responses.retrieve(seen[0].response.id, { stream: true, starting_after: 4 }))
    again.push(event.sequence_number);
  assert.deepEqual(again, seen.slice(5).map((event) => event.sequence_number));
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
}
await assert.rejects(client.responses.create({ model, input, temperature: -1 }), (error) => error.param === "temperature");
console.log("good");
