// The APIs that the playground speaks. One module each has:
//   title, document   its name, and where the server describes the members of its bodies ("within": the member that
//                     holds the sampling members)
//   own               members that the page writes by itself
//   defaults          members that a body needs
//   speaks            turns (a conversation, not one prompt), system, tools, schema, images, scores (log-probabilities), stream
//   framing           how a stream is cut: server-sent "events", or JSON on "lines" (also records that end with NUL)
//   request(chat)     the path and body of a request
//   read(data, answer, chat)   an answer, or an event of a stream, into an Answer (answer.js)

import openaiChat from "./openai_chat.js";
import openaiCompletions from "./openai_completions.js";
import openaiResponses from "./openai_responses.js";
import anthropicMessages from "./anthropic_messages.js";
import ollamaChat from "./ollama_chat.js";
import ollamaGenerate from "./ollama_generate.js";
import tgiGenerate from "./tgi_generate.js";
import tgiChat from "./tgi_chat.js";
import vllmChat from "./vllm_chat.js";
import vllmCompletions from "./vllm_completions.js";
import vllmTokens from "./vllm_tokens.js";
import vllmDemo from "./vllm_demo.js";
import tritonGenerate from "./triton_generate.js";
import kserveInfer from "./kserve_infer.js";
import mindieChat from "./mindie_chat.js";
import mindieInfer from "./mindie_infer.js";
import databricksChat from "./databricks_chat.js";

export const APIS = [
  openaiChat,
  openaiCompletions,
  openaiResponses,
  anthropicMessages,
  ollamaChat,
  ollamaGenerate,
  tgiGenerate,
  tgiChat,
  vllmChat,
  vllmCompletions,
  vllmTokens,
  vllmDemo,
  tritonGenerate,
  kserveInfer,
  mindieChat,
  mindieInfer,
  databricksChat,
];

export const findApi = (id) => APIS.find((api) => api.id === id) ?? APIS[0];
