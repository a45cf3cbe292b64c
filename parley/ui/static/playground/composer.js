// The field for a message, with its images and buttons.

import { byId, iconButton, make } from "../dom.js";
import { findApi } from "../apis/index.js";
import { notify } from "../notice.js";
import { acceptImages } from "../images.js";
import { session } from "./session.js";

let images = []; // data URLs, of the message that is being written

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
  acceptImages(field, byId("image"), byId("composer"), addImages);
}

/** Show the buttons that can be used now. */
export function showComposer() {
  const busy = session.running.size > 0;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("image").hidden = !takesImages();
  byId("note").textContent = findApi(session.current.api).speaks.turns ? "" : "One text: earlier turns are not sent.";
}

export const attachedImages = () => images;

/** Replace the text and the images of the message that is being written. */
export function fillComposer(text, newImages) {
  images = newImages;
  byId("prompt").value = text;
  fitHeight();
  showImages();
}

const takesImages = () =>
  findApi(session.current.api).speaks.images &&
  session.current.panes.every((pane) => session.models.find((model) => model.names.includes(pane.model))?.media?.includes("image"));

function fitHeight() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function showImages() {
  byId("images").replaceChildren(...images.map((url, number) => make("li", {}, make("img", { src: url, alt: `Image ${number + 1}` }),
    iconButton("close", `Remove image ${number + 1}`, () => {
      images = images.filter((each) => each !== url);
      showImages();
    }))));
}

function addImages(urls) {
  if (!takesImages()) {
    notify(findApi(session.current.api).speaks.images ? "This model does not read images." : "Images are not sent in this API.");
    return;
  }
  images = [...images, ...urls];
  showImages();
}
