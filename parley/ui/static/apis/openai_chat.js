import { CHAT_MEMBERS, chatMessages, chatOptions, readChat } from "./chat_form.js";

export default {
  id: "openai-chat",
  title: "OpenAI: chat completions",
  document: { at: "openai/openapi.json", path: "/v1/chat/completions" },
  own: CHAT_MEMBERS,
  speaks: { turns: true, tools: true, schema: true, images: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({
    path: "/v1/chat/completions",
    body: { model: chat.model, messages: chatMessages(chat), ...chat.parameters, ...chatOptions(chat) },
  }),
  read: readChat,
};
