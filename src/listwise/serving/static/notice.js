// The message line at the top of the page.

import { byId, make } from "./dom.js";

const NEWS = 6000; // milliseconds until a message that is not an error disappears

let timer = null;

/** Show a message; `action` adds a button. Errors interrupt screen readers and stay. */
export function say(text, { kind = "error", action = null } = {}) {
  clearTimeout(timer);
  if (kind === "news") timer = setTimeout(hush, action ? 2 * NEWS : NEWS);
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

/** Hide the message. */
export function hush() {
  byId("notice").hidden = true;
}
