// The list of conversations: open one, delete one or all, save them as files.

import { ask, byId, iconButton, make, saveFile } from "../dom.js";
import { deleteConversation } from "../store.js";
import { newConversation, onConversationSaved, session } from "./session.js";

let openConversation = () => {};

/** Show the list whenever it changes. ``open`` opens a conversation. */
export function connectConversationList(open) {
  openConversation = open;
  onConversationSaved(showConversations);
  byId("new").addEventListener("click", () => openConversation(newConversation()));
  byId("export").addEventListener("click", () => saveFile("parley-conversations.json", JSON.stringify(session.conversations, null, 2)));
  byId("export-one").addEventListener("click", () => saveFile("parley-conversation.json", JSON.stringify(session.current, null, 2)));
  byId("delete-all").addEventListener("click", deleteAll);
}

export function showConversations() {
  byId("conversations").replaceChildren(...session.conversations.map((conversation) => {
    const open = make("button", { type: "button", class: "conversation", "aria-current": conversation === session.current ? "true" : false, onclick: () => openConversation(conversation) }, conversation.title);
    return make("li", {}, open, iconButton("trash", `Delete “${conversation.title}”`, () => deleteOne(conversation)));
  }));
  byId("no-conversations").hidden = session.conversations.length > 0;
}

async function deleteOne(conversation) {
  if ((await ask({ title: "Delete this conversation?", text: conversation.title, action: "Delete" })) === null) return;
  await deleteConversation(conversation.id);
  session.conversations = session.conversations.filter((each) => each !== conversation);
  if (conversation === session.current) openConversation(newConversation());
  else showConversations();
}

async function deleteAll() {
  if ((await ask({ title: "Delete all conversations?", text: "They are kept in this browser only, so they cannot be restored.", action: "Delete all" })) === null) return;
  await Promise.all(session.conversations.map((conversation) => deleteConversation(conversation.id)));
  session.conversations = [];
  openConversation(newConversation());
}
