// OpenAI's client for Node: chat, text, streams, errors. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import OpenAI from "openai";

const [address, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ANSWER = "The capital of France is Paris.";

assert.equal((await client.models.list()).data[0].id, model);
const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.equal(whole.choices[0].message.content, ANSWER);
let said = "";
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true }))
  said += chunk.choices[0]?.delta.content ?? "";
assert.equal(said, ANSWER);
const helper = client.chat.completions.stream({ model, messages, temperature: 0 });
assert.equal(await helper.finalContent(), ANSWER);
const text = await client.completions.create({ model, prompt: "Hello", max_tokens: 4 });
assert.ok(text.choices[0].text);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "temperature";
});
await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);

// who leaves in the middle of a stream leaves nothing behind: the next request is served
const stream = await client.chat.completions.create({ model, messages, stream: true, max_tokens: 500 });
for await (const chunk of stream) break;
assert.ok((await client.completions.create({ model, prompt: "Hello", max_tokens: 1 })).choices.length);
console.log("good");
