// A notice at the top of the page.

import { announce, byId } from "./dom.js";

const SHOWN_MILLISECONDS = 6000;
let hiding; // the timer that ends the present notice

/** Show a notice for some seconds, and read it to screen readers. */
export function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
  announce(text);
  clearTimeout(hiding); // of an earlier notice, which would hide this one too soon
  if (text) hiding = setTimeout(() => (byId("notice").hidden = true), SHOWN_MILLISECONDS);
}
