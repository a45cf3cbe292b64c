// The field for a message, with its pictures and buttons.

import { byId, iconButton, make } from "../dom.js";
import { findApi } from "../apis/index.js";
import { notify } from "../notice.js";
import { acceptPictures } from "../pictures.js";
import { session } from "./session.js";

let pictures = []; // data URLs, of the message that is being written

/** Let the field work. ``send`` sends a text, ``stop`` ends all answers that are arriving. */
export function connectComposer({ send, stop }) {
  const field = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!session.running.size) send(field.value);
  });
  field.addEventListener("input", fitHeight);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", stop);
  acceptPictures(field, byId("picture"), byId("composer"), addPictures);
}

/** Show the buttons that can be used now. */
export function showComposer() {
  const busy = session.running.size > 0;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("picture").hidden = !takesPictures();
  byId("note").textContent = findApi(session.current.api).speaks.turns ? "" : "One text: earlier turns are not sent.";
}

export const attachedPictures = () => pictures;

/** Replace the text and the pictures of the message that is being written. */
export function fillComposer(text, newPictures) {
  pictures = newPictures;
  byId("prompt").value = text;
  fitHeight();
  showPictures();
}

const takesPictures = () =>
  findApi(session.current.api).speaks.pictures &&
  session.current.panes.every((pane) => session.models.find((model) => model.names.includes(pane.model))?.media?.includes("image"));

function fitHeight() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function showPictures() {
  byId("pictures").replaceChildren(...pictures.map((url, number) => make("li", {}, make("img", { src: url, alt: `Picture ${number + 1}` }),
    iconButton("close", `Remove picture ${number + 1}`, () => {
      pictures = pictures.filter((each) => each !== url);
      showPictures();
    }))));
}

function addPictures(urls) {
  if (!takesPictures()) {
    notify(findApi(session.current.api).speaks.pictures ? "This model does not read pictures." : "Pictures are not sent in this API.");
    return;
  }
  pictures = [...pictures, ...urls];
  showPictures();
}
