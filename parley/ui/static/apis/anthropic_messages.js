export default {
  id: "anthropic",
  title: "Anthropic: Messages",
  document: { at: "anthropic/openapi.json", path: "/v1/messages" },
  own: ["model", "messages", "system", "tools", "stream", "output_format", "output_config"],
  defaults: { max_tokens: 1024 },
  speaks: { turns: true, tools: true, schema: true, images: true, stream: true },
  framing: "events",
  keyHeader: "x-api-key",
  request: (chat) => ({ path: "/v1/messages", headers: { "anthropic-version": "2023-06-01" }, body: writeBody(chat) }),
  read: readMessage,
};

function writeBody({ model, system, messages, parameters, stream, tools, schema }) {
  return {
    model,
    ...(system ? { system } : {}),
    messages: mergeResults(messages).map(writeMessage),
    ...parameters,
    ...(stream ? { stream: true } : {}),
    ...(tools ? { tools: tools.map(({ function: { name, description, parameters: input_schema } }) => ({ name, description, input_schema })) } : {}),
    ...(schema ? { output_config: { format: { type: "json_schema", schema } } } : {}),
  };
}

/** The results of one turn's calls belong to one message. */
function mergeResults(messages) {
  const merged = [];
  for (const message of messages) {
    const last = merged.at(-1);
    if (message.role !== "tool") merged.push(message);
    else if (last?.results) last.results.push(message);
    else merged.push({ role: "user", results: [message] });
  }
  return merged;
}

function writeMessage(message) {
  if (message.results)
    return { role: "user", content: message.results.map(({ callId, text }) => ({ type: "tool_result", tool_use_id: callId, content: text })) };
  if (message.role === "assistant" && (message.calls?.length || message.kept?.thinking?.length)) {
    const calls = (message.calls ?? []).map(({ id, name, text }) => ({ type: "tool_use", id, name, input: JSON.parse(text || "{}") }));
    const text = message.text ? [{ type: "text", text: message.text }] : [];
    return { role: "assistant", content: [...(message.kept?.thinking ?? []), ...text, ...calls] };
  }
  if (!message.images?.length) return { role: message.role, content: message.text };
  const images = message.images.map((url) => {
    const [, media_type, data] = /^data:([^;]+);base64,(.*)$/s.exec(url);
    return { type: "image", source: { type: "base64", media_type, data } };
  });
  return { role: "user", content: [...images, ...(message.text ? [{ type: "text", text: message.text }] : [])] };
}

function readMessage(data, answer) {
  const delta = data.delta ?? {};
  switch (data.type) {
    case "content_block_start":
      readBlock(data.content_block, data.index, answer);
      break;
    case "content_block_delta":
      answer.addText(delta.text);
      answer.addReasoning(delta.thinking);
      if (delta.partial_json) answer.addCall(data.index, { text: delta.partial_json });
      if (delta.signature) answer.keep("thinking", [{ type: "thinking", thinking: answer.reasoning, signature: delta.signature }]);
      break;
    case "message_start":
      countTokens(data.message.usage, answer);
      break;
    case "message_delta":
      answer.finish(delta.stop_reason);
      countTokens(data.usage, answer);
      break;
    case "error":
      answer.fail(data.error?.message);
      break;
    case "message":
      data.content.forEach((block, number) => readBlock(block, number, answer));
      answer.finish(data.stop_reason);
      countTokens(data.usage, answer);
  }
}

function readBlock(block, number, answer) {
  answer.addText(block.text);
  answer.addReasoning(block.thinking);
  if (block.type === "thinking" && block.signature) answer.keep("thinking", [block]);
  if (block.type === "tool_use") {
    const given = Object.keys(block.input ?? {}).length ? JSON.stringify(block.input) : "";
    answer.addCall(number, { id: block.id, name: block.name, text: given });
  }
}

const countTokens = (usage, answer) =>
  usage && answer.count((usage.input_tokens ?? 0) + (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0), usage.output_tokens);
