// Mastra: an agent's answers at once, streamed and typed, and a tool that it runs. Arguments: HOST:PORT MODEL.
import assert from "node:assert/strict";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const [address, name] = process.argv.slice(2);
const asked = [];
const getWeather = createTool({
  id: "get_weather",
  description: "Get the current weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    asked.push(city);
    return { sky: "sunny", temperature: 21 };
  },
});
const model = { id: `parley/${name}`, url: `http://${address}/v1`, apiKey: "none" };
const options = { modelSettings: { temperature: 0 } };
const question = "What is the capital of France?";
const answer = "The capital of France is Paris.";

const agent = new Agent({ id: "plain", name: "plain", instructions: "", model });
const whole = await agent.generate(question, options);
assert.equal(whole.text, answer);
assert.ok(whole.usage.outputTokens > 0);
let said = "";
for await (const text of (await agent.stream(question, options)).textStream) said += text;
assert.equal(said, answer);
const schema = z.object({ name: z.enum(["Paris", "Rome"]) });
const typed = await agent.generate(question, { ...options, structuredOutput: { schema } });
assert.ok(["Paris", "Rome"].includes(typed.object.name));

const caller = new Agent({ id: "caller", name: "caller", instructions: "", model, tools: { get_weather: getWeather } });
const used = await caller.generate("What is the weather in Paris?", options);
assert.deepEqual(asked, ["Paris"]);
assert.match(used.text, /Paris/);
console.log("good");
