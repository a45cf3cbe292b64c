// The demo server of vLLM 0.6.3: every record has the whole text so far, with the prompt.

export default {
  id: "vllm-demo",
  title: "vLLM: generate (demo server)",
  document: { at: "vllm-0.6.3/openapi.json", path: "/generate" },
  own: ["prompt", "stream"],
  defaults: { max_tokens: 256 },
  speaks: { stream: true },
  framing: "lines",
  request: ({ prompt, parameters, stream }) => ({ path: "/vllm-0.6.3/generate", body: { prompt, ...parameters, stream } }),
  read(data, answer, chat) {
    if (data.text) answer.replaceText(data.text[0].slice(chat.prompt.length));
  },
};
