// The playground: conversations with one model or several side by side, in any API of this server.
// This module connects the parts of the page; each part is a module in playground/.

import { byId } from "./dom.js";
import { notify } from "./notice.js";
import { connectComposer } from "./playground/composer.js";
import { connectConversationList, showConversations } from "./playground/conversation_list.js";
import { closeDrawers, connectDrawers } from "./playground/drawers.js";
import { connectPanes, showPanes } from "./playground/panes.js";
import { answerCalls, editMessage, regenerateAnswer, sendMessage, stopAnswers } from "./playground/sending.js";
import { newConversation, session } from "./playground/session.js";
import { connectSettings, showSettings } from "./playground/settings.js";
import { getJson, showKeyState } from "./server.js";
import { loadConversations } from "./store.js";

function openConversation(conversation) {
  stopAnswers();
  session.current = conversation;
  closeDrawers();
  showAll();
  byId("prompt").focus();
}

function showAll() {
  showSettings();
  showPanes();
  showConversations();
}

function connectParts() {
  connectComposer({ send: sendMessage, stop: stopAnswers });
  connectPanes({ send: sendMessage, edit: editMessage, regenerate: regenerateAnswer, answerCalls });
  connectConversationList(openConversation);
  connectDrawers();
  connectSettings();
  showKeyState();
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    stopAnswers();
    closeDrawers();
  });
}

async function loadModels() {
  try {
    const activity = await getJson("/ui/activity?since=1e12");
    const names = activity.models.map((model) => model.name); // several instances of a cluster may have one model
    session.models = activity.models.filter((model, number) => model.generates !== false && names.indexOf(model.name) === number);
    const loading = activity.models.filter((model) => model.phase === "loading");
    if (loading.length) {
      notify(loading[0].reason);
      setTimeout(loadModels, 2000);
    }
  } catch (error) {
    notify(error.message);
  }
  for (const pane of session.current?.panes ?? []) pane.model ||= session.models[0]?.name ?? "";
}

async function startPage() {
  connectParts();
  session.current = newConversation();
  try {
    session.conversations = await loadConversations();
  } catch (error) {
    notify(`This browser keeps no conversations: ${error.message}`);
  }
  showPanes();
  showConversations();
  await loadModels();
  showAll();
  byId("prompt").focus();
}

startPage();
