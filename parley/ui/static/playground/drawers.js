// The drawers of narrow screens: the list of conversations at one side, the settings at the other.

import { byId } from "../dom.js";

export function connectDrawers() {
  connectDrawer("list-toggle", "show-list");
  connectDrawer("settings-toggle", "show-settings");
  byId("shade").addEventListener("click", closeDrawers);
}

export function closeDrawers() {
  document.body.classList.remove("show-list", "show-settings");
  for (const id of ["list-toggle", "settings-toggle"]) byId(id).setAttribute("aria-expanded", "false");
}

function connectDrawer(id, className) {
  byId(id).addEventListener("click", () => {
    const open = !document.body.classList.contains(className);
    closeDrawers();
    document.body.classList.toggle(className, open);
    byId(id).setAttribute("aria-expanded", String(open));
  });
}
