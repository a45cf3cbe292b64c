// The status page: models, the last hour as plots, and the requests under way.

import { byId, make } from "./dom.js";
import { plot } from "./plot.js";
import { getJson, showKeyState } from "./server.js";

const EVERY = 2000; // milliseconds between two requests for the state; none is sent while the page is hidden
const MINUTE_MEAN = 60; // seconds
const history = new Map(); // label of a model -> {times, samples}
let state = null;

const label = (model) => (model.instance ? `${model.name} · instance ${model.instance}` : model.name); // of a cluster

async function look() {
  try {
    const latest = Math.max(0, ...[...history.values()].map(({ times }) => times.at(-1) ?? 0));
    state = await getJson(`/ui/activity?since=${latest}`);
    remember();
    show();
    byId("notice").hidden = true;
  } catch (error) {
    byId("notice").textContent = error instanceof TypeError ? "The server does not answer." : error.message;
    byId("notice").hidden = false;
    setState("no answer", "bad");
  }
  setTimeout(look, document.hidden ? 4 * EVERY : EVERY);
}

function remember() {
  const start = state.time - 3600;
  for (const model of state.models) {
    const known = history.get(label(model)) ?? { times: [], samples: [] };
    const times = [...known.times, ...model.times];
    const samples = [...known.samples, ...model.samples];
    const first = times.findIndex((time) => time >= start);
    history.set(label(model), first < 0 ? { times: [], samples: [] } : { times: times.slice(first), samples: samples.slice(first) });
  }
  for (const name of history.keys()) if (!state.models.some((model) => label(model) === name)) history.delete(name);
}

function setState(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `badge ${kind}`;
}

function show() {
  setState(state.phase, state.phase === "ready" ? "good" : "warn");
  byId("facts").textContent = `parley ${state.version}${state.role === "mixed" ? "" : ` · instance for ${state.role}`}`;
  byId("models").replaceChildren(...state.models.map(showModel));
  showRequests();
}

function showModel(model) {
  const { times, samples } = history.get(label(model));
  const column = (name) => samples.map((row) => row[state.fields.indexOf(name)]);
  const output = rates(times, column("generated_tokens"));
  const prompt = rates(times, column("prompt_tokens"));
  const view = { times, span: Number(byId("range").value), now: state.time };
  const facts = [model.architecture, model.parameters && `${short(model.parameters)} parameters`, model.dtype, model.quantization !== "none" && model.quantization, model.device && `on ${model.device}`, model.context && `context ${short(model.context)}`].filter(Boolean);
  const kvTotal = model.kv[1];
  return make("section", { class: "model", "aria-label": `Model ${label(model)}` },
    make("div", { class: "model-head" }, make("h2", {}, label(model)), make("span", { class: `badge ${model.phase === "ready" ? "good" : "warn"}` }, model.phase === "loading" ? `loading ${Math.round(model.progress * 100)} %` : model.phase), make("span", { class: "hint" }, facts.join(" · "))),
    model.reason ? make("p", { class: "hint" }, model.reason) : null,
    model.names.length > 1 ? make("p", { class: "hint" }, `Names: ${model.names.join(", ")}`) : null,
    make("dl", { class: "tiles" },
      ...tile("Running", model.running, `batch of up to ${model.max_batch}`),
      ...tile("Waiting", model.waiting, `${model.slots[0]} of ${short(model.slots[1])} places taken`),
      ...tile("KV cache", kvTotal ? share(model.kv[0], kvTotal) : "–", kvTotal ? `${short(model.kv[0])} of ${short(kvTotal)} pages` : "not used yet"),
      ...tile("Prefix hits", share(...model.prefix), `of ${short(model.prefix[1])} tokens`),
      ...tile("Output", `${short(lastMinute(times, column("generated_tokens")))}/s`, "tokens, last minute"),
      ...tile("Restarts", model.restarts, model.preemptions ? `${short(model.preemptions)} preemptions` : "of the engine")),
    make("div", { class: "plots" },
      plot({ ...view, title: "Tokens per second", format: short, lines: [{ name: "output", values: output }, { name: "prompt", values: prompt }] }),
      plot({ ...view, title: "Time to first token", format: seconds, lines: [{ name: "mean", values: column("ttft_mean") }, { name: "95 %", values: column("ttft_p95") }] }),
      plot({ ...view, title: "Time per output token", format: seconds, lines: [{ name: "mean", values: column("tpot_mean") }, { name: "95 %", values: column("tpot_p95") }] }),
      plot({ ...view, title: "Sequences", format: short, lines: [{ name: "running", values: column("running") }, { name: "waiting", values: column("waiting") }] }),
      plot({ ...view, title: "KV cache in use", format: (value) => `${Math.round(value)} %`, most: 100, lines: [{ name: "used", values: percentages(column("kv_used"), column("kv_total")) }] }),
      plot({ ...view, title: "Prompt tokens in the prefix cache", format: (value) => `${Math.round(value)} %`, most: 100, lines: [{ name: "hits", values: percentages(rates(times, column("prefix_hits")), rates(times, column("prefix_queries"))) }] })));
}

const tile = (name, value, note) => [make("div", {}, make("dt", {}, name), make("dd", {}, make("strong", {}, String(value)), make("span", {}, note)))];

/** Return changes per second of a counter; null at its begin, 0 where a restart reset it. */
const rates = (times, values) => values.map((value, at) => (at ? Math.max(0, value - values[at - 1]) / (times[at] - times[at - 1]) : null));

const percentages = (parts, totals) => parts.map((part, at) => (totals[at] ? (100 * part) / totals[at] : null));

function lastMinute(times, values) {
  const first = Math.max(0, times.findIndex((time) => time > state.time - MINUTE_MEAN));
  const gained = values.slice(first + 1).reduce((sum, value, at) => sum + Math.max(0, value - values[first + at]), 0);
  const passed = times.at(-1) - times[first];
  return passed > 0 ? gained / passed : 0;
}

function showRequests() {
  byId("key-head").hidden = !state.requests.some((request) => request.key);
  byId("requests").replaceChildren(...state.requests.map((request) => make("tr", {},
    make("td", {}, make("code", {}, request.id)), make("td", {}, request.api), make("td", {}, request.model),
    byId("key-head").hidden ? null : make("td", {}, request.key),
    make("td", {}, request.started ? "generating" : "waiting"), make("td", { class: "number" }, seconds(request.seconds)),
    make("td", { class: "number" }, short(request.prompt_tokens)), make("td", { class: "number" }, short(request.output_tokens)))));
  byId("no-requests").hidden = state.requests.length > 0;
  const more = state.request_count - state.requests.length;
  byId("whose").textContent = `${more > 0 ? `And ${more} more. ` : ""}${state.sees_all ? "" : "Only requests with your key are listed."}`;
}

const share = (part, total) => (total ? `${((100 * part) / total).toFixed(part && part / total < 0.1 ? 1 : 0)} %` : "–");

function short(number) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (number >= size * (size === 1e3 ? 10 : 1)) return `${+(number / size).toFixed(1)} ${unit}`;
  return number >= 100 || Number.isInteger(number) ? String(Math.round(number)) : number.toFixed(1);
}

function seconds(value) {
  if (value === 0) return "0";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 120 ? `${+value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

byId("range").addEventListener("change", () => state && show());
showKeyState();
look();
