// The form of OpenAI's completions, which several APIs share.

export function completionBody({ model, prompt, parameters, stream, schema, alternatives }) {
  return {
    model,
    prompt,
    ...parameters,
    ...(stream ? { stream: true, stream_options: { include_usage: true } } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...(alternatives ? { logprobs: alternatives } : {}),
  };
}

/** Read an answer, or one event of a stream. */
export function readCompletion(data, answer) {
  const choice = data.choices?.[0];
  answer.addText(choice?.text);
  const scores = choice?.logprobs;
  answer.addTokens(scores?.tokens?.map((token, at) => ({
    token,
    logprob: scores.token_logprobs[at],
    top: Object.entries(scores.top_logprobs?.[at] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  })));
  answer.finish(choice?.finish_reason);
  if (data.usage) answer.count(data.usage.prompt_tokens, data.usage.completion_tokens);
}

export const COMPLETION_MEMBERS = ["model", "prompt", "stream", "stream_options", "response_format", "logprobs"];
