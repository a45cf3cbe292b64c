// The fields for an API's members, made from what the server says about them.

import { make } from "./dom.js";
import { loadMembers, USUAL } from "./schema.js";

/** Fill a holder with the fields of an API. ``values``: the members that are set, by place and name; it is changed. */
export async function showMembers(holder, api, values, onchange) {
  holder.replaceChildren(make("p", { class: "hint" }, "Reading the server's description…"));
  const turn = (holder.turn = {}); // a later call may end sooner
  let members;
  try {
    members = await loadMembers(api);
    if (holder.turn !== turn) return;
  } catch (error) {
    holder.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  const usual = members.filter((member) => USUAL.includes(member.name));
  const others = members.filter((member) => !USUAL.includes(member.name));
  const fields = new Map(members.map((member) => [member, makeField(member, api, values, onchange)]));
  const isSet = ({ nested, name }) => (nested ? "." : "-") + name in values;
  const filter = make("input", { type: "search", placeholder: `Find among ${others.length} more members`, "aria-label": "Find a member", oninput: () => {
    for (const member of others) fields.get(member).hidden = !member.name.includes(filter.value.trim().toLowerCase());
  } });
  holder.replaceChildren(
    make("div", { class: "fields" }, ...usual.map((member) => fields.get(member))),
    others.length
      ? make("details", { class: "more", open: others.some(isSet) }, make("summary", {}, `All members (${members.length})`), filter,
          make("div", { class: "fields" }, ...others.map((member) => fields.get(member))))
      : "");
}

function makeField(member, api, values, onchange) {
  const key = (member.nested ? "." : "-") + member.name;
  const id = `member-${api.id}-${member.name}${member.nested ? "-in" : ""}`;
  const unset = api.defaults?.[member.name];
  const change = (value) => {
    if (value === undefined) delete values[key];
    else values[key] = value;
    onchange();
  };
  const input = FIELDS[member.kind](member, values[key], change, unset);
  input.id = id;
  return make("div", { class: `field ${member.kind}` }, make("label", { for: id, title: member.described }, ...breakable(member.name)), input);
}

/** Let a name break after its underscores. */
const breakable = (name) => name.split("_").flatMap((part, at) => (at ? ["_", make("wbr"), part] : [part]));

const FIELDS = {
  number(member, value, change, unset) {
    const input = make("input", { type: "number", inputmode: "decimal", step: member.whole ? "1" : "any", value: value ?? "", placeholder: unset ?? describeRange(member), title: describeRange(member),
      ...(isShown(member.low) ? { min: member.low } : {}), ...(isShown(member.high) ? { max: member.high } : {}),
      oninput: () => change(input.value.trim() === "" ? undefined : Number(input.value)) });
    return input;
  },
  switch: (member, value, change) => choose(["true", "false"], value === undefined ? "" : String(value), (word) => change(word === "" ? undefined : word === "true")),
  choice: (member, value, change) => choose(member.words, value === undefined ? "" : String(value), (word) => change(word === "" ? undefined : { true: true, false: false }[word] ?? word)),
  text(member, value, change) {
    const input = make("input", { type: "text", spellcheck: "false", value: value ?? "", placeholder: "not set", oninput: () => change(input.value === "" ? undefined : input.value) });
    return input;
  },
  lines(member, value, change) {
    const input = make("textarea", { rows: "2", spellcheck: "false", placeholder: "one per line", value: (value ?? []).join("\n"),
      oninput: () => change(input.value === "" ? undefined : input.value.split("\n").filter((line) => line !== "")) });
    return input;
  },
  json(member, value, change) {
    const input = make("textarea", { rows: "2", spellcheck: "false", class: "code", placeholder: "JSON", value: value === undefined ? "" : JSON.stringify(value), oninput: () => {
      input.removeAttribute("aria-invalid");
      if (input.value.trim() === "") return change(undefined);
      try {
        change(JSON.parse(input.value));
      } catch {
        input.setAttribute("aria-invalid", "true");
        change(undefined);
      }
    } });
    return input;
  },
};

function choose(words, value, onchoose) {
  const select = make("select", { onchange: () => onchoose(select.value) }, make("option", { value: "" }, "not set"), ...words.map((word) => make("option", { value: word }, word)));
  select.value = value;
  return select;
}

const isShown = (bound) => bound !== undefined && Math.abs(bound) < 2 ** 31 - 1;

function describeRange({ low, high }) {
  if (isShown(low) && isShown(high)) return `${low} to ${high}`;
  if (isShown(low)) return `from ${low}`;
  return isShown(high) ? `up to ${high}` : "not set";
}
