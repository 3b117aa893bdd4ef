// Who marks: a name that is stored with the marks. The browser remembers it.

import { byId } from "./dom.js";

const NAME = "listwise-name";

/** The name of the user; null if it was never entered. */
export const knownName = () => localStorage.getItem(NAME);

/** The name of the user, from a dialog if it was never entered; null if the user cancels. */
export async function askName({ again = false } = {}) {
  const known = knownName();
  if (known !== null && !again) return known;
  const dialog = byId("person");
  const input = byId("person-name");
  input.value = known ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  if (dialog.returnValue !== "given") return null;
  localStorage.setItem(NAME, input.value.trim());
  return input.value.trim();
}
