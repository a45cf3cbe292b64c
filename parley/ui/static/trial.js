// A form that sends a request of an operation, and shows the answer as it arrives.

import { button, make } from "./dom.js";
import { showCopyDialog } from "./copy_dialog.js";
import { alternatives, resolve } from "./schema.js";
import { currentKey, keyHeaders, ROOT } from "./server.js";

const MAX_SHOWN = 200_000; // characters of an answer
const EXAMPLES = {
  messages: [{ role: "user", content: "What is the capital of France?" }],
  prompt: "The capital of France is",
  inputs: "The capital of France is",
  input: "The capital of France is",
  text_input: "The capital of France is",
  max_tokens: 100,
  token_ids: [1, 2, 3],
  tokens: [1, 2, 3],
};

export function makeTrial({ prefix, path, method, operation, document }) {
  const fields = (operation.parameters ?? []).map((parameter) => ({ ...parameter, field: parameterField(parameter, document) }));
  const content = operation.requestBody?.content ?? {};
  const hasBody = "application/json" in content;
  const id = `body-${operation.operationId}`;
  const body = make("textarea", { id, class: "code", rows: "8", spellcheck: "false", value: hasBody ? JSON.stringify(exampleBody(content["application/json"].schema, document), null, 2) : "" });
  const status = make("p", { class: "hint", role: "status" });
  const output = make("pre", { class: "program", hidden: true, tabindex: "0", role: "region", "aria-label": "Answer" });
  let stopper = null;

  function describeRequest() {
    let address = `${ROOT}${prefix ? `/${prefix}` : ""}${path}`;
    const query = new URLSearchParams();
    const headers = {};
    for (const { name, in: where, field } of fields) {
      const value = field.value;
      if (where === "path") address = address.replace(`{${name}}`, encodeURIComponent(value));
      else if (value !== "" && where === "query") query.set(name, value);
      else if (value !== "") headers[name] = value;
    }
    return { url: query.size ? `${address}?${query}` : address, headers, method: method.toUpperCase(), body: hasBody ? JSON.parse(body.value) : undefined };
  }

  async function send() {
    stopper?.abort();
    stopper = new AbortController();
    output.hidden = false;
    output.textContent = "";
    const started = performance.now();
    try {
      const request = describeRequest();
      const response = await fetch(request.url, { method: request.method, signal: stopper.signal, credentials: "omit", cache: "no-store",
        headers: { ...(hasBody ? { "content-type": "application/json" } : {}), ...request.headers, ...keyHeaders() }, body: hasBody ? JSON.stringify(request.body) : undefined });
      status.textContent = `${response.status} ${response.statusText} · ${response.headers.get("content-type") ?? "no content"}`;
      await showBody(response, output);
      status.textContent += ` · ${Math.round(performance.now() - started)} ms`;
    } catch (error) {
      if (error.name === "AbortError") return;
      output.hidden = true;
      status.textContent = error instanceof SyntaxError ? `The body is no JSON: ${error.message}` : error.message;
    }
  }

  function copy() {
    try {
      const request = describeRequest();
      showCopyDialog({ ...request, stream: request.body?.stream === true, withKey: Boolean(currentKey()) });
    } catch (error) {
      status.textContent = `The body is no JSON: ${error.message}`;
    }
  }

  return make("div", { class: "trial" },
    ...fields.map(({ name, field }) => make("label", {}, make("code", {}, name), field)),
    hasBody ? make("label", { for: id }, "Body") : null, hasBody ? body : null,
    Object.keys(content).length && !hasBody ? make("p", { class: "hint" }, `A body of ${Object.keys(content).join(", ")} cannot be sent from here.`) : null,
    make("div", { class: "dialog-actions" }, button("Copy as…", copy), button("Send", send, { class: "primary" })), status, output);
}

async function showBody(response, output) {
  const isJson = (response.headers.get("content-type") ?? "").startsWith("application/json");
  if (isJson) {
    const text = await response.text();
    output.textContent = text ? JSON.stringify(JSON.parse(text), null, 2).slice(0, MAX_SHOWN) : "";
    return;
  }
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    if (output.textContent.length < MAX_SHOWN) output.append(decoder.decode(value, { stream: true }));
  }
}

function parameterField({ name, schema, required, in: where }, document) {
  const words = alternatives(schema, document).flatMap((each) => each.enum ?? []).filter((value) => value !== null);
  const value = required || where === "path" ? words[0] ?? "" : "";
  return make("input", { type: "text", value, placeholder: required ? "required" : "not set", spellcheck: "false", autocomplete: "off", "aria-label": name });
}

/** Return a body with the members that are required. */
function exampleBody(schema, document) {
  const variant = schema ? alternatives(schema, document)[0] ?? {} : {};
  const body = {};
  for (const [name, member] of Object.entries(variant.properties ?? {}))
    if (variant.required?.includes(name) || name === "model" || (name in EXAMPLES && !["input", "tokens"].includes(name) && variant.required?.includes(name))) body[name] = exampleValue(name, member, document);
  return body;
}

function exampleValue(name, schema, document, depth = 0) {
  if (name in EXAMPLES) {
    const kinds = alternatives(schema, document).map((each) => each.type);
    const isList = Array.isArray(EXAMPLES[name]);
    if (kinds.includes(isList ? "array" : typeof EXAMPLES[name] === "number" ? "integer" : "string") || kinds.includes(undefined)) return EXAMPLES[name];
  }
  const option = alternatives(schema, document)[0] ?? {};
  if (option.default !== undefined) return option.default;
  if (option.enum) return option.enum[0];
  if (option.type === "object" && depth < 4) return Object.fromEntries((option.required ?? []).map((key) => [key, exampleValue(key, option.properties?.[key] ?? {}, document, depth + 1)]));
  if (option.type === "array") return option.items && depth < 4 ? [exampleValue("", resolve(option.items, document), document, depth + 1)] : [];
  if (option.type === "boolean") return false;
  if (option.type === "integer" || option.type === "number") return option.minimum ?? 1;
  return "text";
}
