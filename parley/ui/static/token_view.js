// The tokens of an answer in colours by their probability, with the alternatives as a tooltip.

import { make } from "./dom.js";

let tip = null;

/** Return the tokens as an element. One of them is in the order of the Tab key; arrows go to the others. */
export function renderTokens(tokens) {
  const spans = tokens.map((token, number) => {
    const share = Math.exp(token.logprob ?? 0);
    const span = make("span", {
      class: `token p${Math.min(9, Math.floor(share * 10))}`,
      tabindex: number ? "-1" : "0",
      role: "listitem",
      "aria-label": describeToken(token),
      onmouseenter: () => showTip(span, token),
      onmouseleave: hideTip,
      onfocus: () => showTip(span, token),
      onblur: hideTip,
    }, token.token);
    return span;
  });
  const holder = make("div", { class: "tokens", role: "list", "aria-label": "Tokens with their probabilities", onkeydown: (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = spans[spans.indexOf(event.target) + step];
    if (!step || !next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } }, ...spans);
  return holder;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (text) => JSON.stringify(text).slice(1, -1);

const describeToken = ({ token, logprob, top }) =>
  `${visible(token)}: ${percent(logprob)}${top.length ? `; ${top.map((other) => `${visible(other.token)} ${percent(other.logprob)}`).join(", ")}` : ""}`;

function showTip(span, { token, logprob, top }) {
  hideTip();
  const rows = (top.length ? top : [{ token, logprob }]).map((other) =>
    make("tr", { class: other.token === token ? "chosen" : "" }, make("td", {}, make("code", {}, visible(other.token))), make("td", {}, percent(other.logprob))));
  tip = make("div", { class: "tip", role: "presentation" }, make("table", {}, make("tbody", {}, ...rows)));
  document.body.append(tip);
  const place = span.getBoundingClientRect();
  const below = place.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? place.bottom + 4 : place.top - tip.offsetHeight - 4}px`;
}

function hideTip() {
  tip?.remove();
  tip = null;
}
