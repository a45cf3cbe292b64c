import { COMPLETION_MEMBERS, completionBody, readCompletion } from "./completion_form.js";

export default {
  id: "openai-completions",
  title: "OpenAI: completions",
  document: { at: "openai/openapi.json", path: "/v1/completions" },
  own: COMPLETION_MEMBERS,
  speaks: { schema: true, scores: true, stream: true },
  framing: "events",
  request: (chat) => ({ path: "/v1/completions", body: completionBody(chat) }),
  read: readCompletion,
};
