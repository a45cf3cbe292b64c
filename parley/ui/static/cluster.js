// The coordinator's page: its instances and what goes through them, from the counters at /data.

import { byId, make } from "./dom.js";

const KEPT = 10; // answers, between which rates are computed
let seen = [];

const UNITS = [["G", 1e9], ["M", 1e6], ["k", 1e4]];

function short(number) {
  for (const [unit, from] of UNITS) if (number >= from) return `${(number / (unit === "k" ? 1e3 : from)).toFixed(1)} ${unit}`;
  return number >= 100 || Number.isInteger(number) ? String(Math.round(number)) : number.toFixed(1);
}

function duration(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

/** Return the change of a counter per second, over the answers that are kept. */
function rate(now, read) {
  const [old] = seen;
  const passed = now.time - (old ? old.time : now.time);
  return passed > 0 ? (read(now) - read(old)) / passed : 0;
}

/** Return the mean of a sum and a count since the oldest answer, or since the start if nothing was counted. */
function mean(now, name) {
  const old = seen[0]?.[name] ?? { sum: 0, count: 0 };
  const count = now[name].count - old.count;
  if (count > 0) return (now[name].sum - old.sum) / count;
  return now[name].count ? now[name].sum / now[name].count : null;
}

const tile = ([name, value, kind]) => make("div", {}, make("dt", {}, name), make("dd", {}, make("strong", { class: kind }, String(value))));

function bar(used, total) {
  return make("td", {}, make("progress", { value: used, max: total || 1, "aria-label": `${short(used)} of ${short(total)}` }), ` ${short(used)} / ${short(total)}`);
}

const number = (value) => make("td", { class: "number" }, String(value));

function instanceRow(instance) {
  const state = instance.state !== "ready" ? instance.state : !instance.attached ? "attaching" : instance.paused ? "failing" : "ready";
  const { count, bytes } = instance.transfers;
  return make("tr", {}, number(instance.id), make("td", {}, make("span", { class: "badge" }, instance.role + (instance.share === null ? "" : ` ${instance.share} %`))),
    make("td", { class: state === "ready" ? "good" : "bad" }, state), make("td", {}, instance.url), number(instance.tasks), bar(instance.slots_used, instance.slots), bar(instance.blocks_used, instance.blocks),
    number(instance.waiting), number(instance.pinned), number(short(instance.prefill_rate)), number(short(instance.decode_rate)), number(count ? `${short(count)}, ${short(bytes || 0)}B` : ""));
}

function show(data) {
  const serves = data.ready && data.master;
  byId("state").textContent = serves ? "ready" : data.master ? "not ready" : "standby";
  byId("state").className = `badge ${serves ? "good" : "bad"}`;
  byId("facts").replaceChildren(...[
    ["Requests", `${short(rate(data, (each) => each.requests))}/s`], ["Tokens", `${short(rate(data, (each) => each.output_tokens))}/s`], ["Running", data.open], ["Queued", data.waiting],
    ["First token", duration(mean(data, "ttft"))], ["Each further", duration(mean(data, "tpot"))], ["Handover", duration(mean(data, "transfer"))],
    ["Separated", short(data.choices.separate || 0)], ["Whole", short(data.choices.whole || 0)], ["Retries", data.retries], ["Failed", data.failed], ["Refused", data.refused], ["Goodput", `${(100 * data.goodput).toFixed(1)} %`],
  ].map(tile));
  byId("rows").replaceChildren(...data.instances.map(instanceRow));
  byId("alarms").replaceChildren(...data.alarms.reverse().map((alarm) => make("tr", {}, make("td", {}, new Date(1000 * alarm.time).toLocaleTimeString()), make("td", {}, alarm.level), make("td", {}, typeof alarm.detail === "string" ? alarm.detail : JSON.stringify(alarm.detail)))));
  byId("no-alarms").hidden = data.alarms.length > 0;
  seen = [...seen, data].slice(-KEPT);
}

async function look() {
  try {
    show(await (await fetch("data", { cache: "no-store" })).json());
  } catch {
    byId("state").textContent = "no answer";
    byId("state").className = "badge bad";
  }
  setTimeout(look, document.hidden ? 5000 : 1000);
}

look();
