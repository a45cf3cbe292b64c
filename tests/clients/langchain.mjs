// LangChain for JavaScript, on the APIs of OpenAI, Anthropic and Ollama. Arguments: HOST:PORT MODEL.
import assert from "node:assert/strict";
import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { ChatOllama, OllamaEmbeddings } from "@langchain/ollama";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";

const [address, model] = process.argv.slice(2);
const url = `http://${address}`;
const QUESTION = "What is the capital of France?";
const WEATHER = "What is the weather in Paris?";
const ANSWER = "The capital of France is Paris.";
const openai = { model, apiKey: "none", temperature: 0, maxTokens: 60, maxRetries: 0, configuration: { baseURL: `${url}/v1` } };
const clients = {
  openai: new ChatOpenAI(openai),
  responses: new ChatOpenAI({ ...openai, useResponsesApi: true }),
  anthropic: new ChatAnthropic({ model, apiKey: "none", temperature: 0, maxTokens: 60, anthropicApiUrl: url, maxRetries: 0 }),
  ollama: new ChatOllama({ model, baseUrl: url, temperature: 0, numPredict: 60, maxRetries: 0 }),
};
const getWeather = tool(async ({ city }) => `sunny in ${city}`, {
  name: "get_weather",
  description: "Get the current weather in a city.",
  schema: z.object({ city: z.string() }),
});
// Ollama's API cannot force a call, and the schema that ChatAnthropic sends has the names only in a description.
const METHODS = { ollama: ["jsonSchema"], anthropic: ["functionCalling"] };
const City = z.object({ name: z.enum(["Paris", "Rome"]) });

async function joined(stream) {
  let whole;
  for await (const chunk of stream) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
}

for (const [name, client] of Object.entries(clients)) {
  const whole = await client.invoke(QUESTION);
  assert.equal(whole.text, ANSWER);
  const { input_tokens: read, output_tokens: written, total_tokens: total } = whole.usage_metadata;
  assert.ok(read > 0 && written > 0 && total === read + written, name);
  const streamed = await joined(await client.stream(QUESTION));
  assert.equal(streamed.text, ANSWER);
  assert.equal(streamed.usage_metadata.total_tokens, total);
  const caller = client.bindTools([getWeather]);
  for (const message of [await caller.invoke(WEATHER), await joined(await caller.stream(WEATHER))]) {
    assert.deepEqual(message.tool_calls.map(({ name, args }) => [name, args]), [["get_weather", { city: "Paris" }]]);
  }
  for (const method of METHODS[name] ?? ["jsonSchema", "functionCalling"]) {
    const typed = await client.withStructuredOutput(City, { name: "city", method }).invoke(QUESTION);
    assert.ok(["Paris", "Rome"].includes(typed.name), name);
  }
}
const byOpenAI = new OpenAIEmbeddings({ model, apiKey: "none", configuration: { baseURL: `${url}/v1` } });
const byOllama = new OllamaEmbeddings({ model, baseUrl: url });
const [vectors, others] = await Promise.all([byOpenAI, byOllama].map((each) => each.embedDocuments(["a", "b"])));
assert.equal(vectors.length, 2);
for (const [i, value] of vectors[1].entries()) assert.ok(Math.abs(value - others[1][i]) < 1e-6);
console.log("good");
