// The APIs of this server: their OpenAPI documents as a page, with a form to try each operation.

import { byId, make } from "./dom.js";
import { DOCUMENTS, documentPath } from "./documents.js";
import { alternatives, loadDocument, resolve } from "./schema.js";
import { showKeyState } from "./server.js";
import { makeTrial } from "./trial.js";

const MAX_DEPTH = 3; // of members within members
let shown = null; // {prefix, document}

async function show(prefix) {
  byId("operations").replaceChildren(make("p", { class: "hint" }, "Reading the document…"));
  byId("raw").href = documentPath(prefix);
  try {
    shown = { prefix, document: await loadDocument(documentPath(prefix)) };
  } catch (error) {
    byId("operations").replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  const { info } = shown.document;
  byId("about").replaceChildren(...withCode(`${info.title} ${info.version}, ${prefix ? `below /${prefix}` : "at the root"}. ${info.description ?? ""}`));
  list();
}

function list() {
  const { prefix, document } = shown;
  const wanted = byId("filter").value.trim().toLowerCase();
  const groups = new Map();
  for (const [path, methods] of Object.entries(document.paths))
    for (const [method, operation] of Object.entries(methods)) {
      const text = `${method} ${path} ${operation.summary} ${memberNames(operation, document).join(" ")}`.toLowerCase();
      if (wanted && !text.includes(wanted)) continue;
      const tag = operation.tags?.[0] ?? "Other";
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(makeOperation({ prefix, path, method, operation, document }));
    }
  const sections = [...groups].map(([tag, operations]) => make("section", { "aria-label": tag }, make("h2", {}, tag), ...operations));
  byId("operations").replaceChildren(...(sections.length ? sections : [make("p", { class: "hint" }, "Nothing was found.")]));
}

const bodyContent = (operation) => Object.entries(operation.requestBody?.content ?? {});

const memberNames = (operation, document) =>
  bodyContent(operation).flatMap(([, { schema }]) => (schema ? alternatives(schema, document).flatMap((each) => Object.keys(each.properties ?? {})) : []));

function makeOperation(place) {
  const { prefix, path, method, operation } = place;
  const details = make("details", { class: "operation" },
    make("summary", {}, make("span", { class: `method ${method}` }, method.toUpperCase()), make("code", {}, `${prefix ? `/${prefix}` : ""}${path}`), make("span", { class: "hint" }, operation.summary)));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(describe(place));
  });
  return details;
}

function describe(place) {
  const { operation, document } = place;
  const parameters = operation.parameters ?? [];
  return make("div", { class: "described" },
    operation.description ? make("p", {}, ...withCode(operation.description)) : null,
    parameters.length ? make("h3", {}, "Parameters") : null,
    parameters.length ? membersTable(parameters.map(({ name, schema, required, in: where }) => [`${name} (${where})`, schema, required]), document) : null,
    ...bodyContent(operation).flatMap(([type, { schema }]) => (schema ? [make("h3", {}, `Body: ${type}`), ...describeBody(schema, document)] : [])),
    make("h3", {}, "Answers"),
    make("ul", { class: "answers" }, ...Object.entries(operation.responses ?? {}).map(([status, answer]) => make("li", {}, make("code", {}, status), " ", ...withCode(resolveAnswer(answer, document).description ?? "")))),
    make("h3", {}, "Try it"),
    makeTrial(place));
}

/** Return the parts of a description, with elements for `code`. */
const withCode = (text) => text.split(/`([^`]+)`/).map((part, number) => (number % 2 ? make("code", {}, part) : part));

const resolveAnswer = (answer, document) => (answer.$ref ? document.components.responses[answer.$ref.split("/").pop()] : answer);

function describeBody(schema, document) {
  const variants = alternatives(schema, document);
  return variants.map((variant, number) => make("div", {},
    variants.length > 1 ? make("p", { class: "hint" }, `Variant ${number + 1} of ${variants.length}`) : null,
    variant.properties ? membersTable(Object.entries(variant.properties).map(([name, each]) => [name, each, variant.required?.includes(name)]), document) : make("p", {}, typeName(variant, document))));
}

function membersTable(members, document, depth = 0) {
  const rows = members.flatMap(([name, schema, required]) => {
    const inner = depth < MAX_DEPTH ? alternatives(schema, document).filter((each) => each.properties) : [];
    const items = depth < MAX_DEPTH ? alternatives(schema, document).filter((each) => each.items).flatMap((each) => alternatives(each.items, document)).filter((each) => each.properties) : [];
    const nested = [...inner, ...items].map((each) => make("details", { class: "nested" }, make("summary", {}, items.includes(each) ? "items" : "members"),
      membersTable(Object.entries(each.properties).map(([key, value]) => [key, value, each.required?.includes(key)]), document, depth + 1)));
    return make("tr", {}, make("th", { scope: "row" }, make("code", {}, name), required ? make("span", { class: "required" }, " required") : null),
      make("td", {}, make("div", {}, typeName(schema, document)), resolve(schema, document).description ? make("div", { class: "hint" }, ...withCode(resolve(schema, document).description)) : null, ...nested));
  });
  return make("table", { class: "members" }, make("tbody", {}, ...rows));
}

function typeName(schema, document) {
  const names = alternatives(schema, document).map((each) => {
    if (each.enum) return each.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(" | ");
    if (each.const !== undefined) return JSON.stringify(each.const);
    if (each.type === "array" && each.items) return `list of ${typeName(each.items, document)}`;
    return `${each.type ?? "any"}${range(each)}`;
  });
  return [...new Set(names)].join(" or ");
}

function range({ minimum, maximum, exclusiveMinimum, exclusiveMaximum, format }) {
  const low = exclusiveMinimum !== undefined ? `above ${exclusiveMinimum}` : minimum !== undefined ? `from ${minimum}` : "";
  const high = exclusiveMaximum !== undefined ? `below ${exclusiveMaximum}` : maximum !== undefined && Math.abs(maximum) < 2 ** 31 - 1 ? `to ${maximum}` : "";
  const words = [low, high, format].filter(Boolean).join(" ");
  return words ? `, ${words}` : "";
}

byId("document").append(...DOCUMENTS.map(([prefix, title]) => make("option", { value: prefix }, title)));
byId("document").addEventListener("change", () => {
  location.hash = byId("document").value;
});
addEventListener("hashchange", open);
byId("filter").addEventListener("input", () => shown && list());

function open() {
  const prefix = decodeURIComponent(location.hash.slice(1));
  const known = DOCUMENTS.some(([each]) => each === prefix) ? prefix : "openai";
  byId("document").value = known;
  show(known);
}

showKeyState();
open();
