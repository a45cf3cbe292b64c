// The settings of the open conversation: its API, the members of requests, tools and a schema.

import { byId, make } from "../dom.js";
import { APIS, findApi } from "../apis/index.js";
import { showMembers } from "../settings_view.js";
import { showPanes } from "./panes.js";
import { saveSoonIfBegun, session } from "./session.js";

const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Report the weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const SCHEMA_EXAMPLE = { type: "object", properties: { city: { type: "string", maxLength: 40 }, capital: { type: "boolean" } }, required: ["city", "capital"] };

/** Show the settings that the conversation's API has. */
export function showSettings() {
  const { current } = session;
  const api = findApi(current.api);
  byId("api").value = api.id;
  const values = (current.parameters[api.id] ??= {});
  showMembers(byId("members"), api, values, saveSoonIfBegun);
  for (const [id, ability] of [["system", api.speaks.turns || api.speaks.system], ["tools", api.speaks.tools], ["schema", api.speaks.schema], ["alternatives", api.speaks.scores], ["stream", api.speaks.stream]]) {
    byId(`${id}-part`).hidden = !ability;
    const field = byId(id);
    if (id === "stream") field.checked = current.stream;
    else field.value = current[id];
  }
}

/** Let the settings change the open conversation. */
export function connectSettings() {
  byId("api").append(...APIS.map((api) => make("option", { value: api.id }, api.title)));
  byId("api").addEventListener("change", () => {
    session.current.api = byId("api").value;
    showSettings();
    showPanes();
    saveSoonIfBegun();
  });
  for (const id of ["system", "tools", "schema"])
    byId(id).addEventListener("input", () => {
      session.current[id] = byId(id).value;
      if (id !== "system") markInvalidJson(byId(id));
      saveSoonIfBegun();
    });
  byId("alternatives").addEventListener("change", () => {
    session.current.alternatives = Number(byId("alternatives").value);
    saveSoonIfBegun();
  });
  byId("stream").addEventListener("change", () => {
    session.current.stream = byId("stream").checked;
    saveSoonIfBegun();
  });
  byId("tools-example").addEventListener("click", () => fillWithExample("tools", TOOLS_EXAMPLE));
  byId("schema-example").addEventListener("click", () => fillWithExample("schema", SCHEMA_EXAMPLE));
}

function fillWithExample(id, example) {
  byId(id).value = JSON.stringify(example, null, 2);
  byId(id).dispatchEvent(new Event("input"));
}

function markInvalidJson(field) {
  field.removeAttribute("aria-invalid");
  if (!field.value.trim()) return;
  try {
    JSON.parse(field.value);
  } catch {
    field.setAttribute("aria-invalid", "true");
  }
}
