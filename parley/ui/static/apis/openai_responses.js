export default {
  id: "openai-responses",
  title: "OpenAI: Responses",
  document: { at: "openai/openapi.json", path: "/v1/responses" },
  own: ["input", "model", "instructions", "stream", "stream_options", "store", "text", "tools", "include", "top_logprobs", "background", "background_options"],
  speaks: { turns: true, tools: true, schema: true, images: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({ path: "/v1/responses", body: writeBody(chat) }),
  read: readResponse,
};

function writeBody({ model, system, messages, parameters, stream, tools, schema, alternatives }) {
  return {
    model,
    ...(system ? { instructions: system } : {}),
    input: messages.flatMap(writeItems),
    store: false,
    ...parameters,
    ...(stream ? { stream: true } : {}),
    ...(tools ? { tools: tools.map((tool) => ({ type: "function", ...tool.function })) } : {}),
    ...(schema ? { text: { format: { type: "json_schema", name: "answer", schema } } } : {}),
    ...(alternatives ? { include: ["message.output_text.logprobs"], top_logprobs: alternatives } : {}),
  };
}

function writeItems(message) {
  if (message.role === "tool") return [{ type: "function_call_output", call_id: message.callId, output: message.text }];
  if (message.role === "user") {
    const images = (message.images ?? []).map((image_url) => ({ type: "input_image", image_url }));
    return [{ role: "user", content: [...images, { type: "input_text", text: message.text }] }];
  }
  const calls = (message.calls ?? []).map(({ id, name, text }) => ({ type: "function_call", call_id: id, name, arguments: text }));
  return [...(message.text ? [{ role: "assistant", content: message.text }] : []), ...calls];
}

const readScores = (scores) => scores?.map(({ token, logprob, top_logprobs }) => ({ token, logprob, top: top_logprobs ?? [] }));

function readResponse(data, answer) {
  switch (data.type) {
    case "response.output_text.delta":
      answer.addText(data.delta);
      answer.addTokens(readScores(data.logprobs));
      break;
    case "response.reasoning_text.delta":
    case "response.reasoning_summary_text.delta":
      answer.addReasoning(data.delta);
      break;
    case "response.output_item.added":
      if (data.item.type === "function_call") answer.addCall(data.output_index, { id: data.item.call_id, name: data.item.name });
      break;
    case "response.function_call_arguments.delta":
      answer.addCall(data.output_index, { text: data.delta });
      break;
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      readEnd(data.response, answer);
      break;
    case "error":
      answer.fail(data.message);
      break;
    default:
      if (data.object === "response") readWhole(data, answer);
  }
}

function readEnd(response, answer) {
  if (response.error) answer.fail(response.error.message);
  answer.finish(response.incomplete_details?.reason ?? response.status);
  if (response.usage) answer.count(response.usage.input_tokens, response.usage.output_tokens);
}

function readWhole(response, answer) {
  response.output.forEach((item, number) => {
    if (item.type === "function_call") answer.addCall(number, { id: item.call_id, name: item.name, text: item.arguments });
    for (const part of [...(item.summary ?? []), ...(item.content ?? [])]) {
      if (item.type === "reasoning") answer.addReasoning(part.text);
      else if (part.type === "output_text") {
        answer.addText(part.text);
        answer.addTokens(readScores(part.logprobs));
      }
    }
  });
  readEnd(response, answer);
}
