// OpenAI's Agents SDK, on both of its APIs: tools, streams and typed output. Arguments: HOST:PORT MODEL.
import assert from "node:assert/strict";
import { Agent, run, setDefaultOpenAIClient, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const [address, model] = process.argv.slice(2);
const WEATHER = "What is the weather in Paris?";
const ANSWER = "It is sunny and 21 degrees in Paris.";
const modelSettings = { temperature: 0, maxTokens: 100 };
setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "none", maxRetries: 0 }));

for (const api of ["responses", "chat_completions"]) {
  setOpenAIAPI(api);
  const asked = [];
  const getWeather = tool({
    name: "get_weather",
    description: "Get the current weather in a city.",
    parameters: z.object({ city: z.string() }),
    execute: async ({ city }) => asked.push(city) && { city, sky: "sunny", temperature: 21 },
  });
  const agent = new Agent({ name: "Weather", model, tools: [getWeather], modelSettings });
  const whole = await run(agent, WEATHER);
  assert.equal(whole.finalOutput, ANSWER);
  const again = await run(agent, [...whole.history, { role: "user", content: "What is the capital of France?" }]);
  assert.ok(again.finalOutput.includes("Paris"), again.finalOutput);
  const stream = await run(agent, WEATHER, { stream: true });
  let said = "";
  for await (const piece of stream.toTextStream()) said += piece;
  await stream.completed;
  assert.equal(said, ANSWER);
  assert.equal(stream.finalOutput, ANSWER);
  assert.deepEqual(asked.slice(0, 1), ["Paris"]);
  const outputType = z.object({ name: z.enum(["Paris", "Rome"]) });
  const typed = await run(new Agent({ name: "City", model, outputType, modelSettings }), "What is the capital of France?");
  assert.ok(["Paris", "Rome"].includes(typed.finalOutput.name));
}
console.log("good");
