import { bareData, OLLAMA_OPTIONS, ollamaOptions, readOllama } from "./ollama_form.js";

export default {
  id: "ollama-generate",
  title: "Ollama: generate",
  document: { ...OLLAMA_OPTIONS, path: "/api/generate" },
  own: ["model", "prompt", "system", "images", "format", "stream", "logprobs", "top_logprobs", "context"],
  speaks: { system: true, schema: true, images: true, scores: true, stream: true },
  framing: "lines",
  request: (chat) => ({
    path: "/api/generate",
    body: {
      model: chat.model,
      prompt: chat.prompt,
      ...(chat.system ? { system: chat.system } : {}),
      ...(chat.images.length ? { images: chat.images.map(bareData) } : {}),
      ...ollamaOptions(chat),
    },
  }),
  read: readOllama,
};
