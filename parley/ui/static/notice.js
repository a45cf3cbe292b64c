// A notice at the top of the page.

import { announce, byId } from "./dom.js";

const SHOWN_MILLISECONDS = 6000;

/** Show a notice for some seconds, and read it to screen readers. */
export function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
  announce(text);
  if (text) setTimeout(() => (byId("notice").hidden = true), SHOWN_MILLISECONDS);
}
