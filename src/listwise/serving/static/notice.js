// One friendly line, where the person looks.

import { byId, make } from "./dom.js";

/** Say something; `action` adds a button. Errors are spoken at once, news when there is time. */
export function say(text, { kind = "error", action = null } = {}) {
  const box = byId("notice");
  box.dataset.kind = kind;
  box.setAttribute("role", kind === "error" ? "alert" : "status");
  byId("notice-text").textContent = text;
  const buttons = action ? [make("button", { type: "button", class: "plain", on: { click: action.run } }, action.label)] : [];
  byId("notice-action").replaceChildren(...buttons);
  box.hidden = false;
}

/** Take the line away. */
export function hush() {
  byId("notice").hidden = true;
}
