// What the playground holds: the models, the conversations, the open one, and the answers that are arriving.

import { findApi } from "../apis/index.js";
import { notify } from "../notice.js";
import { saveConversation } from "../store.js";

const LAST_CHOICES = "parley.last"; // the API and the model that a new conversation begins with
const SAVE_DELAY = 400; // milliseconds after the last change of a setting

export const session = {
  models: [], // as the server describes them
  conversations: [], // the newest first
  current: null, // the open conversation; not among the others before its first message
  running: new Map(), // pane -> AbortController of the answer that it waits for
};

let savingTimer = 0;
let showSaved = () => {};

/** Call a function each time that a conversation was saved. */
export function onConversationSaved(listener) {
  showSaved = listener;
}

export function newConversation() {
  const last = JSON.parse(localStorage.getItem(LAST_CHOICES) ?? "{}");
  const known = session.models.map((model) => model.name);
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

/** Save the open conversation in this browser. */
export async function saveCurrent() {
  const { current, conversations } = session;
  current.changed = Date.now();
  localStorage.setItem(LAST_CHOICES, JSON.stringify({ api: current.api, model: current.panes[0].model }));
  if (!conversations.includes(current)) conversations.unshift(current);
  try {
    await saveConversation(current);
  } catch (error) {
    notify(`This browser does not keep the conversation: ${error.message}`);
  }
  showSaved();
}

/** Save the open conversation soon, unless it has no messages yet. */
export function saveSoonIfBegun() {
  clearTimeout(savingTimer);
  if (session.conversations.includes(session.current)) savingTimer = setTimeout(saveCurrent, SAVE_DELAY);
}
