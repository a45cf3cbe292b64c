// The form of OpenAI's chat completions, which several APIs share: bodies, streams, tool calls, log-probabilities.

/** Return messages in this form. Images are data URLs. */
export function chatMessages({ system, messages }) {
  return [...(system ? [{ role: "system", content: system }] : []), ...messages.map(chatMessage)];
}

function chatMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.role === "assistant") {
    const calls = message.calls ?? [];
    if (!calls.length) return { role: "assistant", content: message.text };
    const tool_calls = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: message.text || null, tool_calls };
  }
  if (!message.images?.length) return { role: "user", content: message.text };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...images, ...(message.text ? [{ type: "text", text: message.text }] : [])] };
}

/** Return the members of a body that the page writes by itself, without a model and messages. */
export function chatOptions({ stream, tools, schema, alternatives }, { usage = true } = {}) {
  return {
    ...(stream ? { stream: true, ...(usage ? { stream_options: { include_usage: true } } : {}) } : {}),
    ...(tools ? { tools } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...(alternatives ? { logprobs: true, top_logprobs: alternatives } : {}),
  };
}

/** Read an answer, or one event of a stream. */
export function readChat(data, answer) {
  const choice = data.choices?.[0];
  const part = choice?.delta ?? choice?.message;
  if (part) {
    answer.addReasoning(part.reasoning_content ?? part.reasoning);
    answer.addText(typeof part.content === "string" ? part.content : "");
    if (Array.isArray(part.content)) for (const piece of part.content) readPiece(piece, answer);
    (part.tool_calls ?? []).forEach((call, number) =>
      answer.addCall(call.index ?? number, { id: call.id, name: call.function?.name, text: call.function?.arguments }));
  }
  answer.addTokens(choice?.logprobs?.content?.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs ?? [] })));
  answer.finish(choice?.finish_reason);
  if (data.usage) answer.count(data.usage.prompt_tokens, data.usage.completion_tokens);
}

function readPiece(piece, answer) {
  if (piece.type === "reasoning") for (const part of piece.summary ?? []) answer.addReasoning(part.text);
  else answer.addText(piece.text);
}

export const CHAT_MEMBERS = ["messages", "model", "stream", "stream_options", "tools", "functions", "function_call", "response_format", "logprobs", "top_logprobs"];
