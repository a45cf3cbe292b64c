// Builds elements. Text becomes text nodes only, so that nothing a model or a server writes is read as HTML.

/** Return an element. Properties that begin with "on" are listeners, the others attributes; false and null leave one out. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Return a button with an accessible name. */
export function button(label, onclick, properties = {}) {
  return make("button", { type: "button", onclick, ...properties }, label);
}

const ICONS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 7h9m5 0h2M4 17h2m5 0h9M13 4v6M6 14v6",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11m-5-5l5 5 5-5M5 20h14",
  upload: "M12 16V5m-5 5l5-5 5 5M5 20h14",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.5h.01",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  key: "M14 10a4 4 0 1 0-3.5 4L12 15.5h2v2h2v2h3v-3z",
  send: "M5 12h13M12 6l6 6-6 6",
  stop: "M7 7h10v10H7z",
};

/** Return an icon as an SVG element that screen readers skip. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  for (const [attribute, value] of [["viewBox", "0 0 24 24"], ["class", "icon"], ["aria-hidden", "true"]])
    svg.setAttribute(attribute, value);
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Return a button that shows an icon only; the label is its accessible name and its tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  return make("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties }, icon(name));
}

/** Say something to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Ask for one line of text, or for a confirmation without a field. Return the text, or null if it was cancelled. */
export function ask({ title, text = "", label = "", value = "", type = "text", action = "OK" }) {
  return new Promise((resolve) => {
    const field = label ? make("input", { type, value, autocomplete: "off", spellcheck: "false" }) : null;
    const dialog = make("dialog", { class: "dialog", "aria-label": title },
      make("form", { method: "dialog" },
        make("h2", {}, title),
        text ? make("p", {}, text) : null,
        field ? make("label", {}, label, field) : null,
        make("div", { class: "dialog-actions" },
          make("button", { value: "cancel", type: "button", onclick: () => dialog.close("cancel") }, "Cancel"),
          make("button", { value: "ok", class: "primary" }, action))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "ok" ? (field ? field.value : "") : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    field?.focus();
  });
}

/** Save text as a file on the user's machine. */
export function saveFile(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Copy text. Pages over plain HTTP from another machine have no clipboard API, so that a selection does it. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const field = make("textarea", { value: text, "aria-hidden": "true" });
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  announce("Copied.");
}
