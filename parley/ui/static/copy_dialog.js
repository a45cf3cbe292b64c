// Shows the request of an answer as a program, in a dialog.

import { copyText, make } from "./dom.js";
import { LANGUAGES } from "./copy_as.js";

export function showCopyDialog(sent) {
  let [language] = LANGUAGES;
  const code = make("code");
  const choices = LANGUAGES.map((each) =>
    make("button", { type: "button", role: "tab", "data-language": each[0], onclick: () => choose(each) }, each[1]));
  const copy = make("button", { type: "button", class: "primary", onclick: async () => {
    await copyText(code.textContent);
    copy.textContent = "Copied";
  } }, "Copy");
  const panel = make("pre", { class: "program", tabindex: "0", role: "tabpanel", "aria-label": "Program" }, code);
  const dialog = make("dialog", { class: "dialog wide-dialog", "aria-label": "Copy the request as a program" },
    make("h2", {}, "Copy as"),
    make("div", { class: "tabs", role: "tablist", "aria-label": "Language" }, ...choices),
    panel,
    sent.withKey ? make("p", { class: "hint" }, "The key is read from the environment variable PARLEY_API_KEY.") : null,
    make("div", { class: "dialog-actions" }, make("button", { type: "button", onclick: () => dialog.close() }, "Close"), copy));

  function choose(each) {
    language = each;
    choices.forEach((choice, number) => {
      const chosen = LANGUAGES[number] === language;
      choice.setAttribute("aria-selected", String(chosen));
      choice.tabIndex = chosen ? 0 : -1;
    });
    code.textContent = language[2](sent);
    copy.textContent = "Copy";
  }

  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.target.getAttribute("role") !== "tab") return;
    const next = (LANGUAGES.indexOf(language) + step + LANGUAGES.length) % LANGUAGES.length;
    choose(LANGUAGES[next]);
    choices[next].focus();
  });
  dialog.addEventListener("close", () => dialog.remove());
  choose(language);
  document.body.append(dialog);
  dialog.showModal();
  copy.focus();
}
