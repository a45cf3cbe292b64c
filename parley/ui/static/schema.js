// The members of an API's bodies, as the server's own OpenAPI document describes them.

import { call, ROOT } from "./server.js";

const documents = new Map();

/** Return an OpenAPI document of the server by its path. */
export async function loadDocument(at) {
  if (!documents.has(at)) documents.set(at, call(`/${at}`).then((response) => response.json()));
  try {
    return await documents.get(at);
  } catch (error) {
    documents.delete(at);
    throw error;
  }
}

export function resolve(schema, document) {
  let found = schema ?? {};
  while (found.$ref) found = document.components.schemas[found.$ref.split("/").pop()] ?? {};
  return found;
}

/** Return the alternatives of a schema, without null. */
export function alternatives(schema, document) {
  const found = resolve(schema, document);
  if (found.anyOf || found.oneOf) return (found.anyOf ?? found.oneOf).flatMap((each) => alternatives(each, document));
  const types = Array.isArray(found.type) ? found.type : [found.type];
  return types.filter((type) => type !== "null").map((type) => ({ ...found, type }));
}

/** Return the schema of the body of an operation, or null. */
export function bodySchema(document, path, method = "post") {
  const content = document.paths[path]?.[method]?.requestBody?.content ?? {};
  return content["application/json"]?.schema ?? null;
}

/** Return the properties of all variants of an object. The first variant that has a member describes it. */
export function properties(schema, document) {
  const found = {};
  for (const variant of alternatives(schema, document))
    for (const [name, member] of Object.entries(variant.properties ?? {})) found[name] ??= member;
  return found;
}

/** Return the members that a user may set: [{name, nested, kind, …}], the usual ones first. */
export async function loadMembers(api) {
  const { at, path, within } = api.document;
  const document = await loadDocument(at);
  const body = properties(bodySchema(document, path), document);
  const inner = within ? properties(body[within], document) : {};
  const describe = (members, nested) =>
    Object.entries(members)
      .filter(([name]) => name !== within && !api.own.includes(name))
      .map(([name, schema]) => ({ name, nested, ...describeField(schema, document) }));
  const all = [...describe(inner, true), ...describe(body, false)].filter((member) => member.kind);
  return all.sort((one, other) => rank(one.name) - rank(other.name) || one.name.localeCompare(other.name));
}

export const USUAL = [
  "temperature", "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict", "top_p", "top_k", "min_p",
  "stop", "stop_sequences", "stop_words", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty",
  "reasoning_effort", "reasoning", "thinking", "think", "enable_thinking", "tool_choice", "n",
];

const rank = (name) => (USUAL.includes(name) ? USUAL.indexOf(name) : USUAL.length);

/** Return the kind of field for a schema, with its bounds; without a kind if only null is valid. */
function describeField(schema, document) {
  const options = alternatives(schema, document);
  const described = resolve(schema, document).description ?? "";
  const ofType = (...types) => options.find((option) => types.includes(option.type));
  const words = options.filter((option) => option.type === "string" && option.enum).flatMap((option) => option.enum).filter((word) => word !== null);
  const number = ofType("number", "integer");
  const list = ofType("array");
  if (ofType("boolean") && words.length) return { kind: "choice", described, words: ["true", "false", ...words] };
  if (number) return { kind: "number", described, whole: number.type === "integer", low: number.minimum ?? number.exclusiveMinimum, high: number.maximum };
  if (ofType("boolean")) return { kind: "switch", described };
  const text = options.find((option) => option.type === "string" && !option.enum);
  if (list && ["string", undefined].includes(resolve(list.items, document).type) && text) return { kind: "lines", described };
  if (list && resolve(list.items, document).type === "string") return { kind: "lines", described };
  if (words.length && !ofType("object")) return { kind: "choice", described, words: [...new Set(words)] };
  if (text && !ofType("object") && !list) return { kind: "text", described };
  if (list || ofType("object")) return { kind: "json", described };
  return options.length ? { kind: "json", described } : {};
}

export { ROOT };
