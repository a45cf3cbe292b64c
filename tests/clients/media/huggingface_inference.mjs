// Hugging Face's client for JavaScript: images in chats, whole and streamed. Arguments: HOST:PORT VISION SPEECH.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { InferenceClient } from "@huggingface/inference";

const [address, model] = process.argv.slice(2);
const { files, question, tokens, answers } = JSON.parse(readFileSync(process.env.MEDIA_CASES));
const url = `data:image/jpeg;base64,${readFileSync(files.image).toString("base64")}`;
const content = [{ type: "image_url", image_url: { url } }, { type: "text", text: question }];
const options = { model, messages: [{ role: "user", content }], temperature: 0, max_tokens: tokens };

const client = new InferenceClient().endpoint(`http://${address}`);
assert.equal((await client.chatCompletion(options)).choices[0].message.content, answers.chat);
let said = "";
for await (const chunk of client.chatCompletionStream(options)) said += chunk.choices[0]?.delta.content ?? "";
assert.equal(said, answers.chat);
console.log("good");
