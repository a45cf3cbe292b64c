// Sends messages and shows the answers as they arrive.

import { announce, byId } from "../dom.js";
import { findApi } from "../apis/index.js";
import { generate } from "../generate.js";
import { saveConversation } from "../store.js";
import { attachedImages, fillComposer, showComposer } from "./composer.js";
import { showLog, showPanes } from "./panes.js";
import { saveCurrent, session } from "./session.js";

/** Send a text with the attached images to the models of all panes. */
export async function sendMessage(text) {
  const { current } = session;
  const images = attachedImages();
  if (!text.trim() && !images.length) return;
  const turn = `${Date.now()}-${Math.random()}`;
  const message = { role: "user", text, turn, images };
  if (current.title === "New conversation") current.title = text.trim().slice(0, 60) || "Image";
  for (const pane of current.panes) pane.messages.push({ ...message });
  fillComposer("", []);
  await answerPanes(current.panes);
}

/** Ask again for the last answer of a pane. */
export async function regenerateAnswer(pane) {
  while (pane.messages.length && pane.messages.at(-1).role === "assistant") pane.messages.pop();
  await answerPanes([pane]);
}

/** Send the results of the tools that a message calls. */
export async function answerCalls(pane, message, results) {
  message.calls.forEach((call, number) => pane.messages.push({ role: "tool", callId: call.id, name: call.name, text: results[number] }));
  await answerPanes([pane]);
}

/** Put a message back into the field, and drop it with everything after it. */
export function editMessage(message) {
  for (const pane of session.current.panes) {
    const at = pane.messages.findIndex((each) => each.turn === message.turn);
    if (at >= 0) pane.messages.length = at;
  }
  fillComposer(message.text, message.images ?? []);
  showPanes();
  byId("prompt").focus();
}

export function stopAnswers() {
  for (const stopper of session.running.values()) stopper.abort();
}

async function answerPanes(panes) {
  const conversation = session.current;
  saveCurrent();
  await Promise.all(panes.map((pane) => answerPane(conversation, pane)));
}

async function answerPane(conversation, pane) {
  const api = findApi(conversation.api);
  const stopper = new AbortController();
  session.running.set(pane, stopper);
  showComposer();
  let paintTimer = 0;
  let latest = null;
  showLog(pane);
  const paint = () => {
    paintTimer = 0;
    if (session.running.has(pane)) showLog(pane, latest);
  };
  const message = await generate(conversation, pane, api, stopper.signal, (arriving) => {
    latest = arriving;
    paintTimer ||= setTimeout(paint, Math.min(400, 30 + arriving.text.length / 100)); // longer texts take longer to render
  });
  clearTimeout(paintTimer);
  session.running.delete(pane);
  message.showTokens = conversation.alternatives > 0 && message.tokens.length > 0;
  pane.messages.push(message);
  showComposer();
  if (conversation !== session.current) {
    if (session.conversations.includes(conversation)) await saveConversation(conversation); // it may have been deleted meanwhile
  } else {
    showLog(pane);
    announce(message.error ? `Error: ${message.error}` : message.calls.length ? "The model calls a tool." : `Answer: ${message.text.slice(0, 500)}`);
    await saveCurrent();
  }
}
