// Sends the conversation of one model in the chosen API, and reads the answer.

import { Answer } from "./answer.js";
import { call, currentKey, postJson, readValues, ROOT } from "./server.js";

/** Return what an adapter needs to know. Raises SyntaxError, with the field's name, for text that is no JSON. */
export function describeChat(conversation, pane, api) {
  const speaks = api.speaks;
  const messages = pane.messages.filter((message) => message.role !== "assistant" || message.text || message.calls?.length);
  const lastUser = messages.findLast((message) => message.role === "user");
  const values = { ...(conversation.parameters[api.id] ?? {}) };
  const parameters = {};
  const nested = {};
  for (const [key, value] of Object.entries(values)) {
    const [place, name] = [key.slice(0, 1), key.slice(1)];
    (place === "." ? nested : parameters)[name] = value;
  }
  const needed = api.document.within && api.document.within !== "" ? nested : parameters;
  for (const [name, value] of Object.entries(api.defaults ?? {})) if (!(name in needed)) needed[name] = value;
  return {
    model: pane.model,
    system: speaks.turns || speaks.system ? conversation.system.trim() : "",
    messages,
    prompt: lastUser?.text ?? "",
    images: lastUser?.images ?? [],
    parameters,
    nested,
    stream: Boolean(speaks.stream && conversation.stream),
    tools: speaks.tools ? readJson(conversation.tools, "Tools") : null,
    schema: speaks.schema ? readJson(conversation.schema, "JSON schema") : null,
    alternatives: speaks.scores ? conversation.alternatives : 0,
  };
}

function readJson(text, name) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

/** Ask for an answer, and return the message to keep. ``onchange`` is called with the Answer while it arrives. */
export async function generate(conversation, pane, api, signal, onchange) {
  const answer = new Answer(() => onchange(answer));
  let sent = null;
  try {
    const chat = describeChat(conversation, pane, api);
    const request = await api.request(chat, (path, body) => postJson(path, body, { signal }));
    sent = { url: ROOT + request.path, headers: request.headers ?? {}, body: request.body, stream: chat.stream };
    onchange(answer);
    const response = await call(request.path, { method: "POST", headers: request.headers, body: request.body, signal });
    for await (const value of readValues(response, api.framing)) {
      if (typeof value.error === "object" && value.error) answer.fail(value.error.message);
      else api.read(value, answer, chat);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish("stopped");
    else answer.fail(error instanceof TypeError ? "The server cannot be reached." : error.message);
  }
  answer.end();
  if (sent) sent.withKey = Boolean(currentKey());
  return { ...answer.toMessage(), api: api.id, model: pane.model, sent };
}
