// The anthropic package for Node: messages, streams, tools, thinking, counts and models.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [address, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: `http://${address}`, apiKey: "none", maxRetries: 0 });
const tools = [
  {
    name: "get_weather",
    description: "Get the weather in a city.",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const question = { role: "user", content: "What is the weather in Paris?" };

const hello = await client.messages.create({ model, max_tokens: 50, messages: [{ role: "user", content: "Hello" }] });
assert.equal(hello.stop_reason, "end_turn");
assert.match(hello.content[0].text, /^Hello/);

const members = { model, max_tokens: 2000, tools, thinking: { type: "enabled", budget_tokens: 1024 } };
const answer = await client.messages.stream({ ...members, messages: [question] }).finalMessage();
const [thought, call] = answer.content;
assert.ok(thought.thinking && thought.signature);
assert.deepEqual([call.name, call.input, answer.stop_reason], ["get_weather", { city: "Paris" }, "tool_use"]);
const result = { type: "tool_result", tool_use_id: call.id, content: '{"city": "Paris", "sky": "sunny", "temperature": 20}' };
const messages = [question, { role: "assistant", content: answer.content }, { role: "user", content: [result] }];
const last = await client.messages.create({ ...members, messages });
assert.match(last.content.at(-1).text, /Paris/);
const counted = await client.messages.countTokens({ model, messages, tools, thinking: members.thinking });
assert.equal(counted.input_tokens, last.usage.input_tokens + last.usage.cache_read_input_tokens);

const names = [];
for await (const each of client.models.list()) names.push(each.id);
assert.ok(names.includes(model));
await assert.rejects(client.messages.create({ ...members, model: "x", messages }), Anthropic.NotFoundError);
console.log("good");
