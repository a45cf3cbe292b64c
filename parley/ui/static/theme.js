// Dark, light, or as the system has it. Runs before the page is painted.

const KEY = "parley.theme";
const ORDER = ["auto", "light", "dark"];
let theme = localStorage.getItem(KEY) ?? "auto";

function apply() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const control of document.querySelectorAll("[data-theme-switch]")) {
    const label = `Theme: ${theme === "auto" ? "as the system" : theme}`;
    control.setAttribute("aria-label", label);
    control.title = label;
  }
}

apply();
document.addEventListener("DOMContentLoaded", () => {
  for (const control of document.querySelectorAll("[data-theme-switch]"))
    control.addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      localStorage.setItem(KEY, theme);
      apply();
    });
  apply();
});
