// Messages as elements: text as Markdown, reasoning folded, tool calls, tokens in colours, and what can be done with each.

import { button, copyText, icon, iconButton, make } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { showCopyDialog } from "./copy_dialog.js";
import { renderTokens } from "./token_view.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

/** Return a message as an element. ``actions``: edit, regenerate, answerCalls; those that are missing are not offered. */
export function renderMessage(message, actions = {}) {
  const body = make("div", { class: "message-body" });
  const article = make("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] }, body);
  if (message.role === "assistant") fillAnswer(body, message, actions);
  else fillOther(body, message);
  if (!actions.streaming) article.append(makeActions(message, actions));
  return article;
}

function fillOther(body, message) {
  if (message.role === "tool") body.append(make("div", { class: "label" }, `Result of ${message.name}`));
  for (const [number, url] of (message.images ?? []).entries())
    body.append(make("img", { src: url, alt: `Image ${number + 1}`, class: "image" }));
  body.append(make("div", { class: "plain" }, message.text));
}

function fillAnswer(body, message, actions) {
  if (message.reasoning) {
    const details = make("details", { class: "reasoning", open: actions.streaming && !message.text },
      make("summary", {}, actions.streaming && !message.text ? "Thinking…" : "Reasoning"),
      make("div", { class: "plain" }, message.reasoning));
    body.append(details);
  }
  if (message.showTokens && message.tokens?.length) body.append(renderTokens(message.tokens));
  else if (message.showPlain) body.append(make("div", { class: "plain" }, message.text));
  else body.append(make("div", { class: "markdown" }, ...renderMarkdown(message.text)));
  if (actions.streaming && !message.text && !message.reasoning && !message.calls?.length)
    body.append(make("span", { class: "waiting" }, make("span", { class: "hidden" }, "Waiting for the first token")));
  if (message.calls?.length) body.append(renderCalls(message, actions));
  if (message.error) body.append(make("p", { class: "error", role: "alert" }, message.error));
}

function renderCalls(message, actions) {
  const fields = [];
  const boxes = message.calls.map((call) => {
    const id = `result-${Math.random().toString(36).slice(2)}`;
    const box = make("div", { class: "call" },
      make("div", { class: "call-name" }, make("span", { class: "label" }, "Tool call"), make("code", {}, call.name || "…")),
      make("pre", { tabindex: "0", role: "region", "aria-label": "Arguments" }, make("code", {}, prettyJson(call.text))));
    if (actions.answerCalls) {
      const field = make("textarea", { id, rows: "2", class: "call-result", placeholder: "What the tool returns, as text or JSON" });
      fields.push(field);
      box.append(make("label", { for: id }, `Result of ${call.name}`), field);
    }
    return box;
  });
  const holder = make("div", { class: "calls" }, ...boxes);
  if (actions.answerCalls)
    holder.append(button(fields.length > 1 ? "Send results" : "Send result", () => actions.answerCalls(fields.map((field) => field.value)), { class: "primary small" }));
  return holder;
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function makeActions(message, actions) {
  const bar = make("div", { class: "message-actions" });
  if (message.role === "user" && actions.edit) bar.append(iconButton("edit", "Edit and send again", actions.edit));
  if (message.role !== "assistant") return bar;
  if (actions.regenerate) bar.append(iconButton("retry", "Regenerate", actions.regenerate));
  if (message.text) bar.append(iconButton("copy", "Copy the text", () => copyText(message.text)));
  if (message.sent)
    bar.append(make("button", { type: "button", class: "text-button", onclick: () => showCopyDialog(message.sent) }, icon("code"), "Copy as…"));
  if (message.tokens?.length) bar.append(toggle("Tokens", message.showTokens, () => actions.show({ showTokens: !message.showTokens })));
  if (message.text && !message.showTokens) bar.append(toggle("Plain", message.showPlain, () => actions.show({ showPlain: !message.showPlain })));
  const facts = describeFacts(message);
  if (facts) bar.append(make("span", { class: "facts" }, facts));
  return bar;
}

const toggle = (label, pressed, onclick) => make("button", { type: "button", class: "text-button", "aria-pressed": String(Boolean(pressed)), onclick }, label);

function describeFacts({ promptTokens, outputTokens, seconds, ttft, reason, sent }) {
  const facts = [];
  if (outputTokens !== null && outputTokens !== undefined) facts.push(`${promptTokens === null ? "" : `${promptTokens} → `}${outputTokens} tokens`);
  if (!sent?.stream) facts.push(formatSeconds(seconds));
  else if (ttft !== null && ttft !== undefined) facts.push(`first after ${formatSeconds(ttft)}`);
  if (sent?.stream && outputTokens > 1 && seconds - ttft > 0.02) facts.push(`${((outputTokens - 1) / (seconds - ttft)).toFixed(1)} tokens/s`);
  if (reason) facts.push(reason);
  return facts.join(" · ");
}

export const formatSeconds = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`);
