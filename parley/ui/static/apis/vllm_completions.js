import { COMPLETION_MEMBERS, completionBody, readCompletion } from "./completion_form.js";

export default {
  id: "vllm-completions",
  title: "vLLM: completions",
  document: { at: "vllm/openapi.json", path: "/v1/completions" },
  own: COMPLETION_MEMBERS,
  speaks: { schema: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({ path: "/vllm/v1/completions", body: completionBody(chat) }),
  read: readCompletion,
};
