// The AI SDK with its provider for compatible servers: images as bytes and files. Arguments: HOST:PORT VISION SPEECH.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [address, vision] = process.argv.slice(2);
const { files, question, tokens, answers } = JSON.parse(readFileSync(process.env.MEDIA_CASES));
const model = createOpenAICompatible({ name: "parley", baseURL: `http://${address}/v1` })(vision);
const text = { type: "text", text: question };
const parts = {
  chat: { type: "image", image: readFileSync(files.image) }, // the SDK finds out that it is a JPEG
  other: { type: "file", data: readFileSync(files.other_image), mediaType: "image/png" },
};

for (const [name, part] of Object.entries(parts)) {
  const messages = [{ role: "user", content: [part, text] }];
  const options = { model, messages, temperature: 0, maxOutputTokens: tokens, maxRetries: 0 };
  assert.equal((await generateText(options)).text, answers[name]);
  let said = "";
  for await (const piece of streamText(options).textStream) said += piece;
  assert.equal(said, answers[name]);
}
const damaged = [{ role: "user", content: [{ type: "file", data: "AAAA", mediaType: "image/png" }, text] }];
await assert.rejects(generateText({ model, messages: damaged, maxRetries: 0 }), /format/);
console.log("good");
