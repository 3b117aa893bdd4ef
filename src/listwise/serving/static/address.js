// The address of a search, so that it can be reloaded and shared:
// #/entry/KEY, or #/entry/KEY:x0-y0-x1-y1,KEY?expand&refine&rerank&filters={"color":"red"} (encoded).
// `expand=off` turns the expansion off; without either, the index decides.
// Photos of the user have no address.

import { checked } from "./filters.js";

/** The address of a search. */
export function toHash({ examples, expand, refine, rerank, filters = {} }) {
  if (!examples.length) return "#/";
  const chosen = Object.keys(filters).length && `filters=${encodeURIComponent(JSON.stringify(filters))}`;
  const expansion = expand === null ? "" : expand ? "expand" : "expand=off";
  const switches = [expansion, refine && "refine", rerank && "rerank", chosen].filter(Boolean).join("&");
  const tail = switches ? `?${switches}` : "";
  if (!examples.every(({ key }) => key)) return `#/photo${tail}`;
  const names = examples.map(({ key, box }) => (box ? `${key}:${box.join("-")}` : key));
  return `#/entry/${names.join(",")}${tail}`;
}

/** The search of an address; `own` if it had photos of the user, which are not kept. */
export function fromHash(hash) {
  const [path, switches = ""] = hash.split("?");
  const on = switches.split("&");
  const entries = [];
  for (const name of path.match(/^#\/entry\/([\d:,-]+)$/)?.[1].split(",") ?? []) {
    const [, key, box] = name.match(/^(\d+)(?::(\d+-\d+-\d+-\d+))?$/) ?? [];
    if (key) entries.push({ key, box: box ? box.split("-").map(Number) : null });
  }
  return {
    entries,
    own: path === "#/photo",
    expand: on.includes("expand") ? true : on.includes("expand=off") ? false : null,
    refine: on.includes("refine"),
    rerank: on.includes("rerank"),
    filters: readFilters(on.find((part) => part.startsWith("filters="))?.slice(8)),
  };
}

function readFilters(text) {
  try {
    const found = Object.entries(JSON.parse(decodeURIComponent(text ?? "{}")));
    return Object.fromEntries(found.map(([name, filter]) => [name, checked(filter)]).filter(([, filter]) => filter !== null));
  } catch {
    return {}; // somebody has changed the address
  }
}
