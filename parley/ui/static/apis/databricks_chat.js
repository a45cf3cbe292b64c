import { CHAT_MEMBERS, chatMessages, chatOptions, readChat } from "./chat_form.js";

export default {
  id: "databricks",
  title: "Databricks: serving endpoint",
  document: { at: "databricks/openapi.json", path: "/serving-endpoints/{endpoint}/invocations" },
  own: CHAT_MEMBERS,
  speaks: { turns: true, tools: true, schema: true, images: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({
    path: `/serving-endpoints/${encodeURIComponent(chat.model)}/invocations`,
    body: { messages: chatMessages(chat), ...chat.parameters, ...chatOptions(chat, { usage: false }) },
  }),
  read: readChat,
};
