import { CHAT_MEMBERS, chatMessages, chatOptions, readChat } from "./chat_form.js";

export default {
  id: "tgi-chat",
  title: "TGI: chat completions",
  document: { at: "tgi/openapi.json", path: "/v1/chat/completions" },
  own: CHAT_MEMBERS,
  speaks: { turns: true, tools: true, schema: true, images: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({
    path: "/tgi/v1/chat/completions",
    body: { model: chat.model, messages: chatMessages(chat), ...chat.parameters, ...chatOptions(chat) },
  }),
  read: readChat,
};
