// What Ollama's two ways to ask share.

export const OLLAMA_OPTIONS = { at: "ollama/openapi.json", within: "options" };

export function ollamaOptions({ parameters, nested, schema, stream, alternatives }) {
  return {
    ...parameters,
    ...(Object.keys(nested).length ? { options: nested } : {}),
    stream,
    ...(schema ? { format: schema } : {}),
    ...(alternatives ? { logprobs: true, top_logprobs: alternatives } : {}),
  };
}

export const bareData = (url) => url.slice(url.indexOf(",") + 1);

export function readOllama(data, answer) {
  if (data.error) answer.fail(data.error);
  const part = data.message ?? data;
  answer.addReasoning(part.thinking);
  answer.addText(part.content ?? part.response);
  (part.tool_calls ?? []).forEach((call) => {
    const number = answer.calls.length;
    answer.addCall(number, { id: call.id ?? `call_${number}`, name: call.function.name, text: JSON.stringify(call.function.arguments) });
  });
  answer.addTokens(data.logprobs?.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs ?? [] })));
  answer.finish(data.done_reason);
  if (data.eval_count) answer.count(data.prompt_eval_count, data.eval_count);
}
