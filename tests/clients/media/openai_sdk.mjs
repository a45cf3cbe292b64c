// OpenAI's client for Node: images, video and sound in chat, transcripts. Arguments: HOST:PORT VISION SPEECH.
import assert from "node:assert";
import { createReadStream, readFileSync } from "node:fs";
import OpenAI from "openai";

const [address, vision, speech] = process.argv.slice(2);
const { files, question, tokens, answers } = JSON.parse(readFileSync(process.env.MEDIA_CASES));
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "none", maxRetries: 0 });
const base64 = (name) => readFileSync(files[name]).toString("base64");

async function checkChat(name, model, part) {
  const messages = [{ role: "user", content: [part, { type: "text", text: question }] }];
  const body = { model, messages, temperature: 0, max_tokens: tokens };
  const whole = await client.chat.completions.create(body);
  assert.equal(whole.choices[0].message.content, answers[name]);
  let said = "";
  for await (const chunk of await client.chat.completions.create({ ...body, stream: true }))
    said += chunk.choices[0]?.delta.content ?? "";
  assert.equal(said, answers[name]);
}

const imagePart = (url) => ({ type: "image_url", image_url: { url } });
await checkChat("chat", vision, imagePart(`data:image/jpeg;base64,${base64("image")}`));
await checkChat("other", vision, imagePart(`data:image/png;base64,${base64("other_image")}`));
await checkChat("video", vision, { type: "video_url", video_url: { url: `data:video/mp4;base64,${base64("video")}` } });
await checkChat("sound", speech, { type: "input_audio", input_audio: { data: base64("clip"), format: "wav" } });
await assert.rejects(checkChat("chat", vision, imagePart("https://example.com/sun.jpg")), (error) => {
  return error instanceof OpenAI.BadRequestError && error.code === "invalid_image_url";
});

const spoken = { model: speech, language: "en", max_completion_tokens: tokens };
const transcript = await client.audio.transcriptions.create({ ...spoken, file: createReadStream(files.clip) });
assert.equal(transcript.text, answers.transcript);
let heard = "";
const stream = await client.audio.transcriptions.create({ ...spoken, file: createReadStream(files.clip), stream: true });
for await (const event of stream) heard += event.delta ?? "";
assert.equal(heard, answers.transcript);
console.log("good");
