// Inference of KServe v2: the prompt is a tensor of one text, and options are parameters.

export default {
  id: "kserve-infer",
  title: "KServe v2: infer",
  document: { at: "triton/openapi.json", path: "/v2/models/{model}/generate" },
  own: ["text_input", "stream", "exclude_input_in_output", "logprobs", "return_logprobs", "return_log_probs", "image", "image_url"],
  defaults: { max_tokens: 256 },
  speaks: {},
  framing: "events",
  request: ({ model, prompt, parameters }) => ({
    path: `/v2/models/${encodeURIComponent(model)}/infer`,
    body: {
      inputs: [
        { name: "text_input", shape: [1], datatype: "BYTES", data: [prompt] },
        { name: "exclude_input_in_output", shape: [1], datatype: "BOOL", data: [true] },
      ],
      parameters,
    },
  }),
  read(data, answer) {
    if (data.error) answer.fail(data.error);
    for (const output of data.outputs ?? []) if (output.name === "text_output") answer.addText(output.data.join(""));
  },
};
