// Helpers for elements. Texts are never parsed as HTML.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * Create an element.
 * @param {string} tag
 * @param {Object} settings `class`, `data`, `on` (events), `vars` (CSS variables), attributes;
 *   false and null leave an attribute out, true writes it without a value.
 */
export function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  const { class: className, data = {}, on = {}, vars = {}, ...attributes } = settings;
  if (className) element.className = className;
  Object.assign(element.dataset, data);
  for (const [event, act] of Object.entries(on)) element.addEventListener(event, act);
  for (const [name, value] of Object.entries(vars)) element.style.setProperty(name, value);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Create an SVG element. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** One of the page's icons. */
export function icon(name) {
  const use = draw("use", { href: `#icon-${name}` });
  return draw("svg", { class: "icon", "aria-hidden": "true" }, use);
}

/** A button with an icon and a label. */
export function iconButton(name, label, act, settings = {}) {
  const all = { type: "button", class: "round", "aria-label": label, title: label, ...settings };
  return make("button", { ...all, on: { click: act } }, icon(name));
}

/** A name that is shortened in the middle, since its end often has a number. */
export function cut(name) {
  const at = Math.max(0, name.length - 10);
  const parts = [name.slice(0, at), name.slice(at)];
  return make("span", { class: "cut" }, ...parts.map((part) => make("span", {}, part)));
}

/**
 * Show other elements in a list. The keyboard focus keeps its place among the buttons, or moves to
 * `empty` if none are left.
 */
export function replaceItems(list, items, empty = null) {
  const buttons = () => [...list.querySelectorAll("button")];
  const place = buttons().indexOf(document.activeElement);
  list.replaceChildren(...items);
  if (place >= 0) (buttons()[place] ?? buttons().at(-1) ?? empty)?.focus();
}

/** Wait; rejects when the signal is aborted. */
export function sleep(milliseconds, signal) {
  return new Promise((done, fail) => {
    const timer = setTimeout(done, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      fail(signal.reason);
    });
  });
}

/** 4993 photos -> "4,993 photos". */
export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}
