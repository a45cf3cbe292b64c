// Images by paste, drop or the file dialog, as data URLs.

import { make } from "./dom.js";

/** Call ``add`` with the data URLs of the images that the user pastes, drops or picks. */
export function acceptImages(field, pick, zone, add) {
  const take = async (files) => {
    const found = [...files].filter((file) => file.type.startsWith("image/"));
    if (found.length) add(await Promise.all(found.map(readFile)));
    return found.length > 0;
  };
  field.addEventListener("paste", (event) => {
    if ([...event.clipboardData.files].some((file) => file.type.startsWith("image/"))) event.preventDefault();
    take(event.clipboardData.files);
  });
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("dropping");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("dropping"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("dropping");
    take(event.dataTransfer.files);
  });
  pick.addEventListener("click", () => {
    const chooser = make("input", { type: "file", accept: "image/*", multiple: true, onchange: () => take(chooser.files) });
    chooser.click();
  });
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
