// Hugging Face's client for JavaScript: text and chat, streams, errors. Arguments: HOST:PORT MODEL.
import assert from "node:assert";
import { InferenceClient } from "@huggingface/inference";

const [address, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ANSWER = "The capital of France is Paris.";

const client = new InferenceClient().endpoint(`http://${address}`);
const options = { model, messages, temperature: 0.01, max_tokens: 16 };
assert.equal((await client.chatCompletion(options)).choices[0].message.content, ANSWER);
let said = "";
for await (const chunk of client.chatCompletionStream(options)) said += chunk.choices[0]?.delta.content ?? "";
assert.equal(said, ANSWER);
const text = await client.textGeneration({ inputs: "Hello", parameters: { max_new_tokens: 4 } });
assert.ok(text.generated_text);
await assert.rejects(client.chatCompletion({ ...options, temperature: -1 }));
console.log("good");
