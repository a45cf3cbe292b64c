// The panes, one for each model: which model it is, and its messages.

import { byId, iconButton, make } from "../dom.js";
import { findApi } from "../apis/index.js";
import { renderMessage } from "../message_view.js";
import { showComposer } from "./composer.js";
import { saveCurrent, saveSoonIfBegun, session } from "./session.js";

const MAX_PANES = 4;
const logs = new Map(); // pane -> element
let actions = {}; // send(text), edit(message), regenerate(pane), answerCalls(pane, message, results)

/** Let the buttons of messages and examples call these actions, and the button for a further model work. */
export function connectPanes(messageActions) {
  actions = messageActions;
  byId("add-model").addEventListener("click", addPane);
}

export function showPanes() {
  const { panes } = session.current;
  logs.clear();
  byId("panes").replaceChildren(...panes.map(makePane));
  byId("panes").dataset.count = panes.length;
  byId("add-model").disabled = panes.length >= MAX_PANES;
  for (const pane of panes) showLog(pane);
  showComposer();
}

/** Show the messages of a pane, with the answer that is arriving, if one is. */
export function showLog(pane, streaming = null) {
  const log = logs.get(pane);
  if (!log) return;
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const last = pane.messages.at(-1);
  if (streaming && log.lastElementChild?.classList.contains("streaming")) {
    log.lastElementChild.replaceWith(streamingView(streaming));
  } else {
    const views = pane.messages.map((message) => renderMessage(message, actionsFor(pane, message, message === last)));
    if (streaming) views.push(streamingView(streaming));
    if (!views.length) views.push(welcome());
    log.replaceChildren(...views);
  }
  if (atEnd || !streaming) log.scrollTop = log.scrollHeight;
}

function addPane() {
  const { current, models } = session;
  const names = models.flatMap((model) => model.names);
  const unused = names.find((name) => !current.panes.some((pane) => pane.model === name)) ?? names[0] ?? "";
  current.panes.push({ model: unused, messages: [] });
  showPanes();
  saveSoonIfBegun();
}

function removePane(pane) {
  session.running.get(pane)?.abort();
  session.current.panes = session.current.panes.filter((each) => each !== pane);
  showPanes();
  saveSoonIfBegun();
}

function makePane(pane, number) {
  const { current, models } = session;
  const select = make("select", { "aria-label": current.panes.length > 1 ? `Model ${number + 1}` : "Model", onchange: () => {
    pane.model = select.value;
    showComposer();
    saveSoonIfBegun();
  } }, ...models.flatMap((model) => model.names.map((name) => make("option", { value: name }, name))));
  if (pane.model && !models.some((model) => model.names.includes(pane.model))) select.append(make("option", { value: pane.model }, `${pane.model} (not served)`));
  select.value = pane.model;
  const log = make("div", { class: "log", role: "log", "aria-live": "off", "aria-label": `Conversation with ${pane.model}`, tabindex: "0" });
  logs.set(pane, log);
  const head = make("div", { class: "pane-head" }, select,
    current.panes.length > 1 ? iconButton("close", `Remove model ${number + 1}`, () => removePane(pane)) : null);
  return make("section", { class: "pane", "aria-label": `Model ${number + 1}` }, head, log);
}

function streamingView(answer) {
  const view = renderMessage({ role: "assistant", ...answer }, { streaming: true });
  view.classList.add("streaming");
  return view;
}

function actionsFor(pane, message, isLast) {
  if (session.running.has(pane)) return {};
  return {
    edit: () => actions.edit(message),
    regenerate: isLast ? () => actions.regenerate(pane) : null,
    answerCalls: isLast && message.calls?.length ? (results) => actions.answerCalls(pane, message, results) : null,
    show: (change) => {
      Object.assign(message, change);
      showLog(pane);
      saveCurrent();
    },
  };
}

function welcome() {
  const examples = ["What is the capital of France?", "What is 3 plus 4?", "Which color is the sky?"];
  return make("div", { class: "welcome" },
    make("h2", {}, "Ask the model something"),
    make("p", {}, findApi(session.current.api).speaks.turns ? "Choose an API and a model above. Only this browser keeps the conversation." : "This API continues one text: earlier turns are not sent."),
    make("div", { class: "examples" }, ...examples.map((text) => make("button", { type: "button", class: "example", onclick: () => actions.send(text) }, text))));
}
