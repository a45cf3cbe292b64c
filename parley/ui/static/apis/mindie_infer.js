export default {
  id: "mindie-infer",
  title: "MindIE: infer",
  document: { at: "mindie/openapi.json", path: "/infer", within: "parameters" },
  own: ["inputs", "stream", "details"],
  defaults: { max_new_tokens: 256 },
  speaks: { stream: true },
  framing: "events",
  request: ({ prompt, parameters, nested, stream }) => ({
    path: "/mindie/infer",
    body: { inputs: prompt, stream, ...parameters, parameters: { ...nested, details: true } },
  }),
  read(data, answer) {
    if (data.error) answer.fail(data.error);
    if (data.token?.text != null) answer.addText(data.token.text);
    else if (data.generated_text != null) answer.replaceText(data.generated_text);
    answer.finish(data.details?.finish_reason);
    if (data.details) answer.count(undefined, data.details.generated_tokens);
  },
};
