// One friendly line, where the person looks.

import { byId, make } from "./dom.js";

const NEWS = 6000; // milliseconds that good news stay

let timer = null;

/** Say something; `action` adds a button. Errors are spoken at once and stay; news do neither. */
export function say(text, { kind = "error", action = null } = {}) {
  clearTimeout(timer);
  if (kind === "news") timer = setTimeout(hush, NEWS);
  const box = byId("notice");
  box.dataset.kind = kind;
  box.setAttribute("role", kind === "error" ? "alert" : "status");
  byId("notice-text").textContent = text;
  byId("notice-action").replaceChildren();
  if (action) {
    const settings = { type: "button", class: "plain", on: { click: action.run } };
    byId("notice-action").append(make("button", settings, action.label));
  }
  box.hidden = false;
}

/** Take the line away. */
export function hush() {
  byId("notice").hidden = true;
}
