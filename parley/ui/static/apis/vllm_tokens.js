// Tokens in: the text is tokenized first, by another request.

export default {
  id: "vllm-tokens",
  title: "vLLM: tokens in (inference)",
  document: { at: "vllm/openapi.json", path: "/inference/v1/generate", within: "sampling_params" },
  own: ["token_ids", "model", "stream", "stream_options", "output_mode", "logprobs"],
  defaults: { max_tokens: 256 },
  speaks: { stream: true },
  framing: "events",
  async request({ model, prompt, parameters, nested, stream }, post) {
    const { tokens } = await post("/tokenize", { model, prompt });
    return {
      path: "/inference/v1/generate",
      body: { model, token_ids: tokens, sampling_params: nested, output_mode: "text", ...parameters, ...(stream ? { stream: true } : {}) },
    };
  },
  read(data, answer) {
    const choice = data.choices?.[0];
    answer.addText(choice?.text);
    answer.finish(choice?.finish_reason);
    if (data.usage) answer.count(data.usage.prompt_tokens, data.usage.completion_tokens);
  },
};
