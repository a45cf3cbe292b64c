export default {
  id: "triton-generate",
  title: "Triton: generate",
  document: { at: "triton/openapi.json", path: "/v2/models/{model}/generate" },
  own: ["text_input", "stream", "exclude_input_in_output", "logprobs", "return_logprobs", "return_log_probs", "image", "image_url"],
  defaults: { max_tokens: 256 },
  speaks: { stream: true },
  framing: "events",
  request: ({ model, prompt, parameters, stream }) => ({
    path: `/v2/models/${encodeURIComponent(model)}/${stream ? "generate_stream" : "generate"}`,
    body: { text_input: prompt, exclude_input_in_output: true, ...parameters, ...(stream ? { stream: true } : {}) },
  }),
  read(data, answer) {
    if (data.error) answer.fail(data.error);
    answer.addText(data.text_output);
    answer.finish(data.finish_reason);
  },
};
