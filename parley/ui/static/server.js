// Requests to this server, with the key that the user gave for this tab.

import { ask, byId } from "./dom.js";

const KEY = "parley.key";
let asking = null; // one dialog for all requests that wait for a key

/** The address of the server: these files are below its "ui/". */
export const ROOT = new URL("..", import.meta.url).href.replace(/\/$/, "");

export const currentKey = () => sessionStorage.getItem(KEY) ?? "";

/** Ask the user for a key. Return whether one was given. */
export async function askKey(reason = "") {
  asking ??= ask({
    title: "API key",
    text: `${reason} The key stays in this tab: it is forgotten when the tab is closed.`.trim(),
    label: "Key",
    type: "password",
    value: currentKey(),
    action: "Use key",
  }).finally(() => (asking = null));
  const key = await asking;
  if (key === null) return false;
  if (key.trim()) sessionStorage.setItem(KEY, key.trim());
  else sessionStorage.removeItem(KEY);
  showKeyState();
  return true;
}

export function showKeyState() {
  const control = byId("key-button");
  if (!control) return;
  const label = currentKey() ? "API key: set for this tab" : "API key: none";
  control.setAttribute("aria-label", label);
  control.title = label;
  control.classList.toggle("set", Boolean(currentKey()));
  control.onclick = () => askKey();
}

/** Return the headers that carry the key. */
export const keyHeaders = () => (currentKey() ? { authorization: `Bearer ${currentKey()}` } : {});

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Send a request; ask for a key, and send it again, as often as one is missing or wrong. Raises ServerError. */
export async function call(path, { method = "GET", headers = {}, body, signal } = {}) {
  for (;;) {
    const response = await fetch(ROOT + path, {
      method,
      headers: { ...(body === undefined ? {} : { "content-type": "application/json" }), ...headers, ...keyHeaders() },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
    if (response.ok) return response;
    const message = errorMessage(await response.text(), response.status);
    const reason = currentKey() ? message : "This server needs an API key."; // the message names a header
    if (response.status !== 401 || !(await askKey(reason))) throw new ServerError(message, response.status);
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();
export const postJson = async (path, body, options) => (await call(path, { method: "POST", body, ...options })).json();

/** Return the sentence in an error of any API. */
function errorMessage(text, status) {
  try {
    const data = JSON.parse(text);
    const found = data.error?.message ?? data.message ?? data.error ?? data.detail ?? data.error_message;
    if (typeof found === "string" && found) return found;
  } catch {
    // not JSON: the text itself is the sentence
  }
  return text.trim().slice(0, 500) || `The server answered with status ${status}.`;
}

/** Yield the JSON values of a response: one of an answer in one piece, or those of a stream as they arrive. */
export async function* readValues(response, framing) {
  const type = response.headers.get("content-type") ?? "";
  const isStream = type.startsWith("text/event-stream") || framing === "lines";
  if (!isStream) {
    yield await response.json();
    return;
  }
  const isEvents = type.startsWith("text/event-stream");
  const separator = isEvents ? /\r?\n\r?\n/ : /[\n\0]/;
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const parts = rest.split(separator);
    rest = done ? "" : parts.pop();
    for (const part of parts) {
      const text = isEvents ? eventData(part) : part.trim();
      if (text && text !== "[DONE]") yield JSON.parse(text);
    }
    if (done) return;
  }
}

function eventData(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
