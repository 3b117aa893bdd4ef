// Requests to the server. Every error is a Failure whose message can be shown to the user.

const TOKEN = "listwise-token";

/** An error: HTTP `status`, 0 without an answer; `wait` seconds before the next attempt. */
export class Failure extends Error {
  constructor(message, status, wait = 0) {
    super(message);
    this.status = status;
    this.wait = wait;
  }
}

let askForToken = async () => null;
let asking = null;

/** Set the function that asks the user for the token: `ask(wrong)` returns it, or null. */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

/** Take the token from the link of `listwise serve --edit`, and remove it from the address. */
export function takeToken() {
  const given = location.hash.match(/^#token=(.+)$/)?.[1];
  if (!given) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(given));
  history.replaceState(null, "", "#/");
}

async function send(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) {
    asking ??= askForToken(token !== null).finally(() => {
      asking = null;
    });
    const given = await asking;
    if (given === null) throw new Failure("This requires the token of the server.", 401);
    sessionStorage.setItem(TOKEN, given);
    return send(path, options);
  }
  throw await failure(response);
}

async function failure(response) {
  const wait = Number(response.headers.get("Retry-After")) || 1;
  let reason = "";
  try {
    reason = (await response.json()).error ?? "";
  } catch {
    // A proxy answered, without JSON.
  }
  const plain = {
    413: "The photo is too large for this server.",
    429: "Too many requests.",
    503: "The server is busy.",
    504: "The server took too long.",
  };
  const message = reason || plain[response.status] || `The server answered ${response.status}.`;
  return new Failure(sentence(message), response.status, wait);
}

function sentence(text) {
  const line = text.trim();
  return line[0].toUpperCase() + line.slice(1) + (/[.!?]$/.test(line) ? "" : ".");
}

const json = async (path, options) => (await send(path, options)).json();

export const info = () => json("api/info");
export const facets = () => json("api/facets");
export const duplicates = (start, many, signal) =>
  json(`api/duplicates?start=${start}&count=${many}`, { signal });
export const entry = (key) => json(`api/entries/${key}`);
export const entries = (start, many) => json(`api/entries?start=${start}&count=${many}`);
export const remove = (key) => json(`api/entries/${key}`, { method: "DELETE" });
export const restore = (key) => json(`api/entries/${key}/restore`, { method: "POST" });
export const thumbnail = (key) => `api/entries/${key}/thumbnail`;
export const photo = (key) => `api/entries/${key}/photo`;
export const blob = async (path, signal) => (await send(path, { signal })).blob();

/** Add photos to the index; with `exif` also what the camera wrote into them. */
export function add(files, exif) {
  const body = new FormData();
  body.append("exif", exif);
  for (const file of files) body.append("photos", file, file.name);
  return json("api/entries", { method: "POST", body });
}

/**
 * Search by photos, each with a box or null, and by entries of the index; `expand` is null for the default of the index.
 * @param {{file: Blob, name: string, box: number[]|null}[]} photos
 * @param {string[]} keys
 */
export function search({ photos, keys, k, expand, refine, rerank, where, same, different, start = 0 }, signal) {
  const body = new FormData();
  for (const { file, name } of photos) body.append("photos", file, file.name || name);
  body.append("boxes", JSON.stringify(photos.map(({ box }) => box)));
  body.append("keys", JSON.stringify(keys));
  body.append("k", k);
  body.append("start", start);
  if (expand !== null) body.append("expand", expand);
  if (refine) body.append("refine", "diffusion");
  body.append("rerank", rerank);
  if (where) body.append("where", where);
  appendMarks(body, same, different);
  return json("api/search", { method: "POST", body, signal });
}

/* Marks and labels */

function appendMarks(body, same = [], different = []) {
  if (same.length) body.append("same", same.join(","));
  if (different.length) body.append("different", different.join(","));
}

/**
 * Store marks of the results of a query, which is an entry or a photo with a box or null.
 * @param {{key: string}|{file: Blob, name: string, box: number[]|null}} query
 */
export function mark(query, { same, different, ranks = {}, by }) {
  const body = new FormData();
  if (query.file) {
    body.append("photos", query.file, query.file.name || query.name);
    if (query.box) body.append("box", JSON.stringify(query.box));
  } else {
    body.append("entry", query.key);
  }
  appendMarks(body, same, different);
  body.append("ranks", JSON.stringify(ranks));
  body.append("by", by);
  return json("api/marks", { method: "POST", body });
}

/** Set the label of entries. */
export function label(name, keys) {
  const body = new FormData();
  body.append("name", name);
  body.append("keys", keys.join(","));
  return json("api/labels", { method: "POST", body });
}

export const unmark = (id) => json(`api/marks/${id}`, { method: "DELETE" });
export const marks = (many) => json(`api/marks?count=${many}`);
export const marksOf = (key, many, signal) => json(`api/marks?entry=${key}&count=${many}`, { signal });
export const queryPhoto = (id) => `api/marks/${id}/photo`;
export const labels = () => blob("api/marks/labels");
export const classes = (many) => json(`api/classes?count=${many}`);
export const suggestions = (many, signal) => json(`api/suggestions?count=${many}`, { signal });
