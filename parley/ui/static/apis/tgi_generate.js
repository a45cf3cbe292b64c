export default {
  id: "tgi-generate",
  title: "TGI: generate",
  document: { at: "tgi/openapi.json", path: "/generate", within: "parameters" },
  own: ["inputs", "stream", "details", "decoder_input_details", "top_n_tokens", "grammar"],
  defaults: { max_new_tokens: 256 },
  speaks: { schema: true, scores: true, stream: true },
  framing: "events",
  request: ({ prompt, parameters, nested, schema, stream, alternatives }) => ({
    path: stream ? "/generate_stream" : "/generate",
    body: {
      inputs: prompt,
      ...parameters,
      parameters: {
        ...nested,
        details: true,
        ...(schema ? { grammar: { type: "json", value: schema } } : {}),
        ...(alternatives ? { top_n_tokens: alternatives } : {}),
      },
    },
  }),
  read: readGenerate,
};

function readGenerate(data, answer) {
  if (data.error) answer.fail(data.error);
  const { token, top_tokens, details } = data;
  if (token) {
    answer.addText(token.special ? "" : token.text);
    answer.addTokens([readToken(token, top_tokens)]);
  } else answer.addText(data.generated_text);
  if (!token) answer.addTokens(details?.tokens?.map((each, at) => readToken(each, details.top_tokens?.[at])));
  answer.finish(details?.finish_reason);
  if (details) answer.count(details.input_length ?? details.prefill?.length, details.generated_tokens);
}

const readToken = (token, top) => ({ token: token.text, logprob: token.logprob, top: (top ?? []).map(({ text, logprob }) => ({ token: text, logprob })) });
