import { bareData, OLLAMA_OPTIONS, ollamaOptions, readOllama } from "./ollama_form.js";

export default {
  id: "ollama-chat",
  title: "Ollama: chat",
  document: { ...OLLAMA_OPTIONS, path: "/api/chat" },
  own: ["model", "messages", "tools", "format", "stream", "logprobs", "top_logprobs"],
  speaks: { turns: true, tools: true, schema: true, images: true, scores: true, stream: true },
  framing: "lines",
  request: (chat) => ({
    path: "/api/chat",
    body: {
      model: chat.model,
      messages: [...(chat.system ? [{ role: "system", content: chat.system }] : []), ...chat.messages.map(writeMessage)],
      ...(chat.tools ? { tools: chat.tools } : {}),
      ...ollamaOptions(chat),
    },
  }),
  read: readOllama,
};

function writeMessage({ role, text, images, calls, name }) {
  return {
    role,
    content: text,
    ...(role === "tool" ? { tool_name: name } : {}),
    ...(images?.length ? { images: images.map(bareData) } : {}),
    ...(calls?.length ? { tool_calls: calls.map((call) => ({ function: { name: call.name, arguments: JSON.parse(call.text || "{}") } })) } : {}),
  };
}
