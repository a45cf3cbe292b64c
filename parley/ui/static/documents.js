// The server's OpenAPI documents: one of all APIs, and one below each prefix that has a single API.

export const DOCUMENTS = [
  ["", "All APIs"],
  ["openai", "OpenAI"],
  ["anthropic", "Anthropic"],
  ["ollama", "Ollama"],
  ["vllm", "vLLM"],
  ["vllm-0.6.3", "vLLM 0.6.3 (demo server)"],
  ["tgi", "Text Generation Inference"],
  ["tgi-0.9.4", "Text Generation Inference 0.9.4"],
  ["tei", "Text Embeddings Inference"],
  ["triton", "Triton / KServe v2"],
  ["mindie", "MindIE"],
  ["mindie-old", "MindIE as of 2025"],
  ["databricks", "Databricks"],
  ["cohere", "Cohere"],
];

export const documentPath = (prefix) => `${prefix ? `${prefix}/` : ""}openapi.json`;
