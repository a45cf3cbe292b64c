// The playground: conversations with one model or several side by side, in any API of this server.

import { announce, ask, byId, iconButton, make, saveFile } from "./dom.js";
import { APIS, findApi } from "./apis/index.js";
import { generate } from "./generate.js";
import { renderMessage } from "./message_view.js";
import { acceptPictures } from "./pictures.js";
import { getJson, showKeyState } from "./server.js";
import { showMembers } from "./settings_view.js";
import { deleteConversation, loadConversations, saveConversation } from "./store.js";

const MAX_PANES = 4;
const LAST = "parley.last"; // the choices that a new conversation begins with
let models = []; // as the server describes them
let conversations = [];
let current = null;
let pictures = []; // of the message that is being written
const running = new Map(); // pane -> AbortController
const logs = new Map(); // pane -> element

// -- conversations

function newConversation() {
  const last = JSON.parse(localStorage.getItem(LAST) ?? "{}");
  const known = models.map((model) => model.name);
  return {
    id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`,
    title: "New conversation",
    changed: Date.now(),
    api: findApi(last.api).id,
    system: "",
    stream: true,
    tools: "",
    schema: "",
    alternatives: 0,
    parameters: {},
    panes: [{ model: known.includes(last.model) ? last.model : known[0] ?? "", messages: [] }],
  };
}

async function keep() {
  current.changed = Date.now();
  localStorage.setItem(LAST, JSON.stringify({ api: current.api, model: current.panes[0].model }));
  if (!conversations.includes(current)) conversations.unshift(current);
  try {
    await saveConversation(current);
  } catch (error) {
    notify(`This browser does not keep the conversation: ${error.message}`);
  }
  showConversations();
}

function showConversations() {
  byId("conversations").replaceChildren(...conversations.map((conversation) => {
    const open = make("button", { type: "button", class: "conversation", "aria-current": conversation === current ? "true" : false, onclick: () => openConversation(conversation) }, conversation.title);
    return make("li", {}, open, iconButton("trash", `Delete “${conversation.title}”`, () => remove(conversation)));
  }));
  byId("no-conversations").hidden = conversations.length > 0;
}

function openConversation(conversation) {
  stopAll();
  current = conversation;
  closeDrawers();
  showAll();
  byId("prompt").focus();
}

async function remove(conversation) {
  if ((await ask({ title: "Delete this conversation?", text: conversation.title, action: "Delete" })) === null) return;
  await deleteConversation(conversation.id);
  conversations = conversations.filter((each) => each !== conversation);
  if (conversation === current) openConversation(newConversation());
  else showConversations();
}

async function removeAll() {
  if ((await ask({ title: "Delete all conversations?", text: "They are kept in this browser only, so they cannot be restored.", action: "Delete all" })) === null) return;
  await Promise.all(conversations.map((conversation) => deleteConversation(conversation.id)));
  conversations = [];
  openConversation(newConversation());
}

// -- panes

function showAll() {
  showSettings();
  showPanes();
  showConversations();
}

function showPanes() {
  logs.clear();
  byId("panes").replaceChildren(...current.panes.map(makePane));
  byId("panes").dataset.count = current.panes.length;
  byId("add-model").disabled = current.panes.length >= MAX_PANES;
  for (const pane of current.panes) showLog(pane);
  showComposer();
}

function makePane(pane, number) {
  const select = make("select", { "aria-label": current.panes.length > 1 ? `Model ${number + 1}` : "Model", onchange: () => {
    pane.model = select.value;
    showComposer();
    keepIfBegun();
  } }, ...models.flatMap((model) => model.names.map((name) => make("option", { value: name }, name))));
  if (pane.model && !models.some((model) => model.names.includes(pane.model))) select.append(make("option", { value: pane.model }, `${pane.model} (not served)`));
  select.value = pane.model;
  const log = make("div", { class: "log", role: "log", "aria-live": "off", "aria-label": `Conversation with ${pane.model}`, tabindex: "0" });
  logs.set(pane, log);
  const head = make("div", { class: "pane-head" }, select,
    current.panes.length > 1 ? iconButton("close", `Remove model ${number + 1}`, () => {
      running.get(pane)?.abort();
      current.panes = current.panes.filter((each) => each !== pane);
      showPanes();
      keepIfBegun();
    }) : null);
  return make("section", { class: "pane", "aria-label": `Model ${number + 1}` }, head, log);
}

function showLog(pane, streaming = null) {
  const log = logs.get(pane);
  if (!log) return;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const last = pane.messages.at(-1);
  if (streaming && log.lastElementChild?.classList.contains("streaming")) {
    log.lastElementChild.replaceWith(streamingView(streaming));
  } else {
    const views = pane.messages.map((message, at) => renderMessage(message, actionsFor(pane, message, at, message === last)));
    if (streaming) views.push(streamingView(streaming));
    if (!views.length) views.push(welcome());
    log.replaceChildren(...views);
  }
  if (atEnd || !streaming) log.scrollTop = log.scrollHeight;
}

function streamingView(answer) {
  const view = renderMessage({ role: "assistant", ...answer }, { streaming: true });
  view.classList.add("streaming");
  return view;
}

function actionsFor(pane, message, at, isLast) {
  if (running.has(pane)) return {};
  return {
    edit: () => edit(message),
    regenerate: isLast ? () => regenerate(pane) : null,
    answerCalls: isLast && message.calls?.length ? (results) => answerCalls(pane, message, results) : null,
    show: (change) => {
      Object.assign(message, change);
      showLog(pane);
      keep();
    },
  };
}

function welcome() {
  const examples = ["What is the capital of France?", "What is 3 plus 4?", "Which color is the sky?"];
  return make("div", { class: "welcome" },
    make("h2", {}, "Ask the model something"),
    make("p", {}, findApi(current.api).speaks.turns ? "Choose an API and a model above. Everything stays in this browser." : "This API continues one text: earlier turns are not sent."),
    make("div", { class: "examples" }, ...examples.map((text) => make("button", { type: "button", class: "example", onclick: () => send(text) }, text))));
}

// -- sending

async function send(text) {
  if (!text.trim() && !pictures.length) return;
  const turn = `${Date.now()}-${Math.random()}`;
  const message = { role: "user", text, turn, pictures };
  pictures = [];
  if (current.title === "New conversation") current.title = text.trim().slice(0, 60) || "Picture";
  for (const pane of current.panes) pane.messages.push({ ...message });
  byId("prompt").value = "";
  fitPrompt();
  showPictures();
  await answerAll(current.panes);
}

async function answerAll(panes) {
  const conversation = current;
  keep();
  await Promise.all(panes.map((pane) => answer(conversation, pane)));
}

async function answer(conversation, pane) {
  const api = findApi(conversation.api);
  const stopper = new AbortController();
  running.set(pane, stopper);
  showComposer();
  let due = 0;
  let latest = null;
  showLog(pane);
  const paint = () => {
    due = 0;
    if (running.has(pane)) showLog(pane, latest);
  };
  const message = await generate(conversation, pane, api, stopper.signal, (arriving) => {
    latest = arriving;
    due ||= setTimeout(paint, Math.min(400, 30 + arriving.text.length / 100)); // longer texts take longer to render
  });
  clearTimeout(due);
  running.delete(pane);
  message.showTokens = conversation.alternatives > 0 && message.tokens.length > 0;
  pane.messages.push(message);
  showComposer();
  if (conversation !== current) {
    if (conversations.includes(conversation)) await saveConversation(conversation); // it may have been deleted meanwhile
  } else {
    showLog(pane);
    announce(message.error ? `Error: ${message.error}` : message.calls.length ? "The model calls a tool." : `Answer: ${message.text.slice(0, 500)}`);
    await keep();
  }
}

function stopAll() {
  for (const stopper of running.values()) stopper.abort();
}

async function regenerate(pane) {
  while (pane.messages.length && pane.messages.at(-1).role === "assistant") pane.messages.pop();
  await answerAll([pane]);
}

async function answerCalls(pane, message, results) {
  message.calls.forEach((call, number) => pane.messages.push({ role: "tool", callId: call.id, name: call.name, text: results[number] }));
  await answerAll([pane]);
}

/** Put a message back into the field, and drop it with everything after it. */
function edit(message) {
  for (const pane of current.panes) {
    const at = pane.messages.findIndex((each) => each.turn === message.turn);
    if (at >= 0) pane.messages.length = at;
  }
  pictures = message.pictures ?? [];
  byId("prompt").value = message.text;
  fitPrompt();
  showPanes();
  showPictures();
  byId("prompt").focus();
}

// -- the field for a message

const takesPictures = () =>
  findApi(current.api).speaks.pictures && current.panes.every((pane) => models.find((model) => model.names.includes(pane.model))?.media?.includes("image"));

function showComposer() {
  const busy = running.size > 0;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("picture").hidden = !takesPictures();
  byId("note").textContent = findApi(current.api).speaks.turns ? "" : "One text: earlier turns are not sent.";
}

function fitPrompt() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function showPictures() {
  byId("pictures").replaceChildren(...pictures.map((url, number) => make("li", {}, make("img", { src: url, alt: `Picture ${number + 1}` }),
    iconButton("close", `Remove picture ${number + 1}`, () => {
      pictures = pictures.filter((each) => each !== url);
      showPictures();
    }))));
}

function addPictures(urls) {
  if (!takesPictures()) {
    notify(findApi(current.api).speaks.pictures ? "This model does not read pictures." : "Pictures are not sent in this API.");
    return;
  }
  pictures = [...pictures, ...urls];
  showPictures();
}

// -- settings

function showSettings() {
  const api = findApi(current.api);
  byId("api").value = api.id;
  const values = (current.parameters[api.id] ??= {});
  showMembers(byId("members"), api, values, keepIfBegun);
  for (const [id, ability] of [["system", api.speaks.turns || api.speaks.system], ["tools", api.speaks.tools], ["schema", api.speaks.schema], ["alternatives", api.speaks.scores], ["stream", api.speaks.stream]]) {
    byId(`${id}-part`).hidden = !ability;
    const field = byId(id);
    if (id === "stream") field.checked = current.stream;
    else field.value = current[id];
  }
}

function connectSettings() {
  byId("api").append(...APIS.map((api) => make("option", { value: api.id }, api.title)));
  byId("api").addEventListener("change", () => {
    current.api = byId("api").value;
    showSettings();
    showPanes();
    keepIfBegun();
  });
  for (const id of ["system", "tools", "schema"])
    byId(id).addEventListener("input", () => {
      current[id] = byId(id).value;
      if (id !== "system") checkJson(byId(id));
      keepIfBegun();
    });
  byId("alternatives").addEventListener("change", () => {
    current.alternatives = Number(byId("alternatives").value);
    keepIfBegun();
  });
  byId("stream").addEventListener("change", () => {
    current.stream = byId("stream").checked;
    keepIfBegun();
  });
  byId("tools-example").addEventListener("click", () => fill("tools", TOOLS_EXAMPLE));
  byId("schema-example").addEventListener("click", () => fill("schema", SCHEMA_EXAMPLE));
}

function fill(id, value) {
  byId(id).value = JSON.stringify(value, null, 2);
  byId(id).dispatchEvent(new Event("input"));
}

function checkJson(field) {
  field.removeAttribute("aria-invalid");
  if (!field.value.trim()) return;
  try {
    JSON.parse(field.value);
  } catch {
    field.setAttribute("aria-invalid", "true");
  }
}

const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Report the weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const SCHEMA_EXAMPLE = { type: "object", properties: { city: { type: "string", maxLength: 40 }, capital: { type: "boolean" } }, required: ["city", "capital"] };

let keeping = 0;
function keepIfBegun() {
  clearTimeout(keeping);
  if (conversations.includes(current)) keeping = setTimeout(keep, 400);
}

// -- the rest of the page

function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
  announce(text);
  if (text) setTimeout(() => (byId("notice").hidden = true), 6000);
}

function closeDrawers() {
  document.body.classList.remove("show-list", "show-settings");
  for (const id of ["list-toggle", "settings-toggle"]) byId(id).setAttribute("aria-expanded", "false");
}

function connectDrawer(id, name) {
  byId(id).addEventListener("click", () => {
    const open = !document.body.classList.contains(name);
    closeDrawers();
    document.body.classList.toggle(name, open);
    byId(id).setAttribute("aria-expanded", String(open));
  });
}

function connect() {
  const field = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running.size) send(field.value);
  });
  field.addEventListener("input", fitPrompt);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    stopAll();
    closeDrawers();
  });
  byId("stop").addEventListener("click", stopAll);
  byId("new").addEventListener("click", () => openConversation(newConversation()));
  byId("add-model").addEventListener("click", () => {
    const names = models.flatMap((model) => model.names);
    const unused = names.find((name) => !current.panes.some((pane) => pane.model === name)) ?? names[0] ?? "";

    current.panes.push({ model: unused, messages: [] });
    showPanes();
    keepIfBegun();
  });
  byId("export").addEventListener("click", () => saveFile("parley-conversations.json", JSON.stringify(conversations, null, 2)));
  byId("export-one").addEventListener("click", () => saveFile("parley-conversation.json", JSON.stringify(current, null, 2)));
  byId("delete-all").addEventListener("click", removeAll);
  connectDrawer("list-toggle", "show-list");
  connectDrawer("settings-toggle", "show-settings");
  byId("shade").addEventListener("click", closeDrawers);
  acceptPictures(field, byId("picture"), byId("composer"), addPictures);
  connectSettings();
  showKeyState();
}

async function loadModels() {
  try {
    const state = await getJson("/ui/activity?since=1e12");
    const names = state.models.map((model) => model.name); // several instances of a cluster may have one model
    models = state.models.filter((model, number) => model.generates !== false && names.indexOf(model.name) === number);
    const loading = state.models.filter((model) => model.phase === "loading");
    if (loading.length) {
      notify(loading[0].reason);
      setTimeout(loadModels, 2000);
    }
  } catch (error) {
    notify(error.message);
  }
  for (const pane of current?.panes ?? []) pane.model ||= models[0]?.name ?? "";
}

async function begin() {
  connect();
  current = newConversation();
  try {
    conversations = await loadConversations();
  } catch (error) {
    notify(`This browser keeps no conversations: ${error.message}`);
  }
  showPanes();
  showConversations();
  await loadModels();
  showAll();
  byId("prompt").focus();
}

begin();
