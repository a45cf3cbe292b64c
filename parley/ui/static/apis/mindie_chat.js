import { CHAT_MEMBERS, chatMessages, chatOptions, readChat } from "./chat_form.js";

export default {
  id: "mindie-chat",
  title: "MindIE: chat completions",
  document: { at: "mindie/openapi.json", path: "/v1/chat/completions" },
  own: CHAT_MEMBERS,
  speaks: { turns: true, tools: true, schema: true, images: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({
    path: "/mindie/v1/chat/completions",
    body: { model: chat.model, messages: chatMessages(chat), ...chat.parameters, ...chatOptions(chat, { usage: false }) },
  }),
  read: readChat,
};
